"""Scores inside chunked prefill: enter the queries and keys of a chunk, leave scores of candidates.

Candidates are the survivors of earlier chunks and the tokens of this one. Two kinds of scorers:
those that judge a token by itself (``key_norm``, ``random``, learned ``gates``) do so once, when it
arrives, and its score is stored beside it; those that judge by queries (``snapkv``, ``expected_attention``) judge
all candidates anew with the last queries of each chunk, so that the last chunk, whose queries are
the end of the prompt, decides. ``kvzip`` reads the whole context twice and cannot run here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvgrain_jax.budgets import scores
from kvgrain_jax.budgets.gates import Gate, gate_scores
from kvgrain_jax.engine.model import Model, hidden_size
from kvgrain_jax.errors import ConfigError

CHUNK_SCORERS = ("snapkv", "expected_attention", "key_norm", "random", "gates")


@dataclasses.dataclass(frozen=True)
class ChunkScorer:
    """How candidates are scored while a prompt is computed chunk by chunk.

    Attributes:
      name: one of ``CHUNK_SCORERS``. For ``gates`` the engine is given their weights.
      queries: last queries of a chunk that ``snapkv`` and ``expected_attention`` look at.
      neighbours: odd number of neighbouring positions that ``snapkv`` averages over.
      seed: of ``random``.

    Raises:
      ConfigError: there is no such scorer, or a number is out of range.
    """

    name: str = "snapkv"
    queries: int = 32
    neighbours: int = 7
    seed: int = 0

    def __post_init__(self):
        if self.name not in CHUNK_SCORERS:
            raise ConfigError(
                f"The scorer {self.name!r} cannot score chunk by chunk; choose one of "
                f"{', '.join(CHUNK_SCORERS)}."
            )
        if self.queries < 1:
            raise ConfigError(f"queries is {self.queries}; give at least 1.")
        if self.neighbours < 1 or self.neighbours % 2 == 0:
            raise ConfigError(f"neighbours is {self.neighbours}; give an odd positive number.")

    @property
    def by_queries(self) -> bool:
        """Whether candidates are judged anew in every chunk; such scores depend on the question."""
        return self.name in ("snapkv", "expected_attention")

    def on_arrival(
        self,
        layer: int,
        k: Float[Array, "T K D"],
        positions: Int[Array, "T"],
        gate: Gate | None = None,
        hidden: Float[Array, "T d_model"] | None = None,
    ) -> Float[Array, "K T"]:
        """Scores of tokens by themselves; 0 where only queries can tell, ``-inf`` for padding.

        Args:
          layer: for the random numbers.
          k: keys.
          positions: -1 for padding.
          gate: gates of the layer, for ``gates``.
          hidden: what the layer's keys were made from, for ``gates``.
        """
        if self.name == "gates":
            assert gate is not None
            assert hidden is not None
            return gate_scores(gate, hidden, k_positions=positions)
        if self.name == "key_norm":
            return scores.key_norm(k, k_positions=positions)
        if self.name == "random":
            key = jax.random.fold_in(jax.random.key(self.seed), layer)
            return scores.random(key, k.shape[1], k_positions=positions)
        return jnp.broadcast_to(
            jnp.where(positions >= 0, 0.0, -jnp.inf)[None, :], (k.shape[1], k.shape[0])
        )

    def by_last_queries(
        self,
        q: Float[Array, "C H D"],
        q_positions: Int[Array, "C"],
        k: Float[Array, "K M D"],
        v: Float[Array, "K M D"],
        positions: Int[Array, "K M"],
        *,
        max_context: int,
    ) -> Float[Array, "K M"]:
        """Scores of candidates by the last queries of a chunk.

        Args:
          q: queries of the chunk.
          q_positions: position of each, -1 for padding.
          k: keys of each head's candidates, in any order.
          v: their values.
          positions: their positions, -1 for padding.
          max_context: above the largest position.
        """
        n_heads = k.shape[0]
        last = jnp.max(q_positions)
        seen = jnp.where(q_positions > last - self.queries, q_positions, -1)
        if q.shape[0] > self.queries:  # the last real queries; padding lies behind them
            start = jnp.maximum(jnp.argmax(q_positions) + 1 - self.queries, 0)
            q = lax.dynamic_slice_in_dim(q, start, self.queries)
            seen = lax.dynamic_slice_in_dim(seen, start, self.queries)
        grouped = q.reshape(q.shape[0], n_heads, -1, q.shape[-1]).swapaxes(0, 1)

        def of_head(q, k, v, positions):  # a model of one KV head
            at = {"q_positions": seen, "k_positions": positions}
            if self.name == "snapkv":
                return scores.snapkv(q, k[:, None], **at, pool=1)[0]
            return scores.expected_attention(q, k[:, None], **at, values=v[:, None])[0]

        found = jax.vmap(of_head)(grouped, k, v, positions)
        if self.name == "snapkv":
            found = _mean_of_neighbours(found, positions, self.neighbours, max_context)
        return found


def check_gates(gates: Gate | None, model: Model, scorer: ChunkScorer) -> None:
    """Check that a scorer has the gates that it needs.

    Raises:
      ConfigError: it has none, or has no use for them, or they are of another model's sizes.
    """
    if (scorer.name == "gates") != (gates is not None):
        raise ConfigError(
            f"The scorer is {scorer.name!r} and {'no gates are' if gates is None else 'gates are'} "
            "given; gates belong to the scorer 'gates' (experiments.train_gate makes them)."
        )
    if gates is None:
        return
    asked = (model.n_layers, model.n_kv_heads, model.n_heads // model.n_kv_heads)
    if (found := gates.query.shape[:-2]) != asked:
        raise ConfigError(
            f"The gates are of {found} layers, KV heads and queries of each, the model has {asked}; "
            "train them on this model."
        )
    if (width := gates.query.shape[-1]) != (wanted := hidden_size(model)):
        raise ConfigError(
            f"The gates take hidden states of {width} numbers, the model's have {wanted}; train "
            "them on this model."
        )


def _mean_of_neighbours(
    values: Float[Array, "K M"], positions: Int[Array, "K M"], size: int, max_context: int
) -> Float[Array, "K M"]:
    """Mean over the candidates at ``size`` neighbouring positions, whatever their order."""
    valid = positions >= 0
    head = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.where(valid, positions, max_context)

    def window_sum(x):
        by_position = jnp.zeros((values.shape[0], max_context)).at[head, place].set(x, mode="drop")
        return lax.reduce_window(by_position, 0.0, lax.add, (1, size), (1, 1), "SAME")

    total = window_sum(jnp.where(valid, values, 0.0))
    count = window_sum(valid.astype(jnp.float32))
    mean = (total / jnp.maximum(count, 1.0)).at[head, place].get(mode="clip")
    return jnp.where(valid, mean, -jnp.inf)
