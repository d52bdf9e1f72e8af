"""Learned gates: scores of tokens from the hidden states that make their keys, no second pass.

Enter hidden states, leave scores in (0, 1), one gate for each KV head of a layer. A gate attends in a
low-rank space from the token to itself against a few learned sinks: with RMS-normed projections
``q_g = norm(W_q h)`` and ``k = norm(W_k h)`` its score is the mean over the query group of

    exp(q_g k) / (exp(q_g k) + sum_s exp(q_g sink_s) + exp(bias))

Trained by plain gradient descent to give the scores of ``kvzip``. Source: Fast KVzip
(arXiv:2601.17668).
"""

import dataclasses
from os import PathLike

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvgrain_jax.errors import ConfigError

EPS = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """Weights of the gates of one layer, float32; ``R`` is the low rank. Gates of all layers together
    have a leading axis.

    Attributes:
      query: ``W_q``.
      key: ``W_k``.
      query_scale: gain of the RMS norm of ``q``.
      key_scale: gain of the RMS norm of ``k``.
      sinks: learned keys that a token competes with.
      bias: of each query head.
    """

    query: Float[Array, "*layers K G R d_model"]
    key: Float[Array, "*layers K R d_model"]
    query_scale: Float[Array, "*layers K R"]
    key_scale: Float[Array, "*layers K R"]
    sinks: Float[Array, "*layers K sinks R"]
    bias: Float[Array, "*layers K G"]


def init_gate(
    key: Array, *, d_model: int, n_kv_heads: int, group: int, rank: int = 16, n_sinks: int = 8
) -> Gate:
    """Random gates.

    Raises:
      ConfigError: a size is not positive.
    """
    if min(d_model, n_kv_heads, group, rank, n_sinks) < 1:
        raise ConfigError("A gate needs positive d_model, heads, group, rank and sinks.")
    keys = jax.random.split(key, 3)
    projection = d_model**-0.5
    return Gate(
        query=projection * jax.random.normal(keys[0], (n_kv_heads, group, rank, d_model)),
        key=projection * jax.random.normal(keys[1], (n_kv_heads, rank, d_model)),
        query_scale=jnp.ones((n_kv_heads, rank)),
        key_scale=jnp.ones((n_kv_heads, rank)),
        sinks=jax.random.normal(keys[2], (n_kv_heads, n_sinks, rank)),
        bias=jnp.zeros((n_kv_heads, group)),
    )


def gate_scores(
    gate: Gate, hidden: Float[Array, "T d_model"], *, k_positions: Int[Array, "T"]
) -> Float[Array, "K T"]:
    """Scores of the tokens of one layer.

    Args:
      gate: the weights.
      hidden: input of the layer's attention, after its norm.
      k_positions: position of each token, -1 for padding, whose score is ``-inf``.
    """
    open_ = _openness(gate, hidden.astype(jnp.float32))
    return jnp.where((k_positions >= 0)[None, :], open_, -jnp.inf)


def gate_loss(
    gate: Gate, hidden: Float[Array, "T d_model"], target: Float[Array, "K T"]
) -> Float[Array, ""]:
    """Binary cross-entropy of the gates against scores in [0, 1], mean over heads and tokens."""
    open_ = jnp.clip(_openness(gate, hidden.astype(jnp.float32)), 1e-6, 1 - 1e-6)
    return -(target * jnp.log(open_) + (1 - target) * jnp.log1p(-open_)).mean()


def train_step(
    gates: Gate,
    hidden: Float[Array, "L T d_model"],
    target: Float[Array, "L K T"],
    rate: float | Float[Array, ""],
) -> tuple[Gate, Float[Array, " L"]]:
    """One step of gradient descent for the gates of all layers.

    Args:
      gates: gates with a leading axis of layers.
      hidden: hidden states of one sample.
      target: its ``kvzip`` scores.
      rate: learning rate.

    Returns:
      The new gates, and the loss of each layer before the step.
    """
    losses, slopes = jax.vmap(jax.value_and_grad(gate_loss))(gates, hidden, target)
    return jax.tree.map(lambda weight, slope: weight - rate * slope, gates, slopes), losses


def read_gates(path: str | PathLike[str], *, checkpoint: str) -> Gate:
    """Gates of all layers from a file of ``experiments.train_gate``.

    Args:
      path: the file.
      checkpoint: identity of the model that is to use them.

    Raises:
      ConfigError: there is no such file, it holds no gates, or those of another checkpoint.
    """
    names = [field.name for field in dataclasses.fields(Gate)]
    try:
        with np.load(path, allow_pickle=False) as file:
            made_for = str(file["checkpoint"])
            weights = {name: jnp.asarray(file[name], jnp.float32) for name in names}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"No gates can be read from {str(path)!r} ({error}); experiments.train_gate writes them."
        ) from error
    if made_for != checkpoint:
        raise ConfigError(
            f"The gates in {path} were trained on {made_for}, the model is {checkpoint}; train them "
            "on this model."
        )
    return Gate(**weights)


def _openness(gate: Gate, hidden: Float[Array, "T d_model"]) -> Float[Array, "K T"]:
    q = _rms(jnp.einsum("kgrd,td->kgtr", gate.query, hidden))
    k = _rms(jnp.einsum("krd,td->ktr", gate.key, hidden))
    q = q * gate.query_scale[:, None, None, :]
    k = k * gate.key_scale[:, None, :]
    scale = q.shape[-1] ** -0.5
    own = scale * jnp.einsum("kgtr,ktr->kgt", q, k)
    others = scale * jnp.einsum("kgtr,ksr->kgts", q, gate.sinks)
    bias = jnp.broadcast_to(gate.bias[:, :, None, None], (*own.shape, 1))
    against = jax.nn.logsumexp(jnp.concatenate([others, bias], axis=-1), axis=-1)
    return jax.nn.sigmoid(own - against).mean(axis=1)


def _rms(x: Float[Array, "*rows R"]) -> Float[Array, "*rows R"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
