"""Forward passes of a model over a context whose cache is compressed, by masks.

A context is computed in full, then each KV head of each layer is told which tokens it keeps; questions
are answered over what is kept. A masked token has probability zero in every later softmax and
positions stay absolute, so this is what a cache that holds the kept tokens alone computes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvgrain_jax.budgets import scores as scorers
from kvgrain_jax.engine import Model
from kvgrain_jax.errors import ConfigError

OBSERVED = 32  # last queries of a context that snapkv and expected_attention look through


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What the layers computed of a context.

    Attributes:
      q: its last ``OBSERVED`` queries, one array a layer.
      k: keys.
      v: values.
    """

    q: tuple[Float[Array, "Q H D"], ...]
    k: tuple[Float[Array, "T K D"], ...]
    v: tuple[Float[Array, "T K D"], ...]


def read_context(model: Model, tokens: Int[Array, "T"]) -> Context:
    """Full causal forward pass over a context."""
    return _read(model.step, model.params, tokens)


def score_context(
    model: Model,
    context: Context,
    scorer: str,
    *,
    key: Array,
    repetition: Int[Array, "R"] | None = None,
) -> Float[Array, "L K T"]:
    """Scores of every token of a context in every head.

    Args:
      model: the model.
      context: what ``read_context`` returned.
      scorer: name of the scores.
      key: of ``random``.
      repetition: what follows the context while ``kvzip`` looks: the request to repeat it, and the
        context again. Other scorers need none.

    Raises:
      ConfigError: scores are NaN, or ``kvzip`` has no repetition.
    """
    if scorer == "kvzip":
        if repetition is None:
            raise ConfigError("The scorer 'kvzip' needs a repetition of the context.")
        found = _repeat(model.step, model.params, context, repetition)
    else:
        found = _score(context, scorer, key)
    scorers.check_scores(found)
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedQuestions:
    """Questions on one context side by side; each sees the context and itself.

    Attributes:
      tokens: int32 ``[M]``, prompts and answers, the last token of each answer left out.
      targets: int32 ``[M]``, the token that should come next.
      offsets: int32 ``[M]``, place of each token in its question.
      question: int32 ``[M]``, index of the question; -1 for padding.
      answered: int32 ``[A]``, indices of the tokens whose targets belong to an answer.
    """

    tokens: Int[np.ndarray | Array, " M"]
    targets: Int[np.ndarray | Array, " M"]
    offsets: Int[np.ndarray | Array, " M"]
    question: Int[np.ndarray | Array, " M"]
    answered: Int[np.ndarray | Array, " A"]


def pack_questions(
    questions: Sequence[tuple[Sequence[int], Sequence[int]]], multiple: int = 16
) -> PackedQuestions:
    """Packs ``(prompt, answer)`` pairs; ``M`` is filled up to a multiple, so few sizes compile."""
    length = sum(len(prompt) + len(answer) - 1 for prompt, answer in questions)
    capacity = -(-length // multiple) * multiple
    packed = {name: np.zeros(capacity, np.int32) for name in ("tokens", "targets", "offsets")}
    question, answered = np.full(capacity, -1, np.int32), []
    end = 0
    for index, (prompt, answer) in enumerate(questions):
        ids = np.array([*prompt, *answer], np.int32)
        here = np.arange(end, end + len(ids) - 1, dtype=np.int32)
        packed["tokens"][here], packed["targets"][here] = ids[:-1], ids[1:]
        packed["offsets"][here] = np.arange(len(here))
        question[here] = index
        answered.append(here[len(prompt) - 1 :])
        end += len(here)
    return PackedQuestions(**packed, question=question, answered=np.concatenate(answered))


def answer_questions(
    model: Model,
    context: Context,
    keep: Bool[Array, "V L K T"],
    questions: PackedQuestions,
) -> tuple[Float[np.ndarray, "V questions"], Bool[np.ndarray, "V questions"]]:
    """Feeds questions with their answers over ``V`` choices of kept tokens at once.

    Returns:
      For each choice and question the mean log-probability of a token of the answer (natural log),
      and whether each of them was the most likely one.
    """
    chances, best = _answer(model.step, model.params, context, keep, questions)
    owner = np.asarray(questions.question)[questions.answered]
    of_question = (owner[:, None] == np.unique(owner)).astype(np.float64)
    of_question /= of_question.sum(axis=0)
    right = np.asarray(best, np.float64) @ of_question
    return np.asarray(chances, np.float64) @ of_question, right > 1 - 1e-9


@functools.partial(jax.jit, static_argnums=0)
def _read(step: Callable[..., Any], params: Any, tokens: Int[Array, "T"]) -> Context:
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    causal = jnp.tril(jnp.ones((len(positions), len(positions)), bool))

    def attend(cache, layer, q, k, v):
        del layer
        return _attention(q, k, v, causal[None]), (*cache, (q[-OBSERVED:], k, v))

    _, layers = step(params, tokens, positions, (), attend, jnp.zeros(1, jnp.int32))
    return Context(*(tuple(arrays) for arrays in zip(*layers, strict=True)))


@functools.partial(jax.jit, static_argnums=0)
def _repeat(
    step: Callable[..., Any], params: Any, context: Context, repetition: Int[Array, "R"]
) -> Float[Array, "L K T"]:
    n_tokens, n_repeated = context.k[0].shape[0], repetition.shape[0]
    positions = jnp.arange(n_tokens + n_repeated, dtype=jnp.int32)
    causal = positions[None, :] <= positions[n_tokens:, None]

    def attend(found, layer, q, k, v):
        keys = jnp.concatenate([context.k[layer], k])
        values = jnp.concatenate([context.v[layer], v])
        score = scorers.kvzip(q, keys, q_positions=positions[n_tokens:], k_positions=positions)
        return _attention(q, keys, values, causal[None]), (*found, score[:, :n_tokens])

    _, found = step(params, repetition, positions[n_tokens:], (), attend, jnp.zeros(1, jnp.int32))
    return jnp.stack(found)


@functools.partial(jax.jit, static_argnums=1)
def _score(context: Context, scorer: str, key: Array) -> Float[Array, "L K T"]:
    positions = jnp.arange(context.k[0].shape[0], dtype=jnp.int32)
    return jnp.stack(
        [
            scorers.score_tokens(
                scorer,
                q,
                k,
                q_positions=positions[-q.shape[0] :],
                k_positions=positions,
                key=jax.random.fold_in(key, layer),
            )
            for layer, (q, k) in enumerate(zip(context.q, context.k, strict=True))
        ]
    )


@functools.partial(jax.jit, static_argnums=0)
def _answer(
    step: Callable[..., Any],
    params: Any,
    context: Context,
    keep: Bool[Array, "V L K T"],
    questions: PackedQuestions,
) -> tuple[Float[Array, "V A"], Bool[Array, "V A"]]:
    """Log-probability of each token of the answers, and whether it was the most likely one."""
    same = questions.question[:, None] == questions.question[None, :]
    own = same & (questions.offsets[None, :] <= questions.offsets[:, None])
    positions = keep.shape[-1] + questions.offsets
    targets = questions.targets[questions.answered]

    def answer(keep: Bool[Array, "L K T"]) -> tuple[Float[Array, "A"], Bool[Array, "A"]]:
        def attend(cache, layer, q, k, v):
            kept = keep[layer][:, None, :]
            shape = (kept.shape[0], q.shape[0])
            seen = jnp.concatenate(
                [
                    jnp.broadcast_to(kept, (*shape, kept.shape[-1])),
                    jnp.broadcast_to(own[None], (*shape, own.shape[-1])),
                ],
                axis=-1,
            )
            keys = jnp.concatenate([context.k[layer], k])
            values = jnp.concatenate([context.v[layer], v])
            return _attention(q, keys, values, seen), cache

        logits, _ = step(params, questions.tokens, positions, (), attend, questions.answered)
        chances = jax.nn.log_softmax(logits, axis=-1)
        of_target = jnp.take_along_axis(chances, targets[:, None], axis=-1)[:, 0]
        return of_target, logits.argmax(axis=-1).astype(jnp.int32) == targets

    return jax.vmap(answer)(keep)


def _attention(
    q: Float[Array, "Q H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    seen: Bool[Array, "heads Q T"],
) -> Float[Array, "Q H D"]:
    """Attention of each KV head to the keys that it sees; ``heads`` is ``K``, or 1 for all alike."""
    n_queries, n_heads, head_dim = q.shape
    grouped = q.reshape(n_queries, k.shape[1], -1, head_dim)
    logits = head_dim**-0.5 * jnp.einsum(
        "qkgd,tkd->kgqt", grouped, k, preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("kgqt,tkd->qkgd", weights.astype(v.dtype), v)
    return out.reshape(n_queries, n_heads, head_dim).astype(q.dtype)
