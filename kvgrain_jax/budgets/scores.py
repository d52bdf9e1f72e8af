"""Scores of cached tokens, and the choice of those that stay.

Enter queries and keys of one layer with their positions, leave float32 scores ``[K, T]``: larger is
more worth keeping. A score belongs to a KV head, reduced over the query heads that share it. Padding
has position -1: as a query it counts for nothing, as a key its score is ``-inf`` and it is never
chosen. All functions are pure and work under ``jax.jit``; a NaN that comes in goes through to
``check_scores``, which host code calls on what it is about to use.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvgrain_jax.errors import ConfigError

SCORERS = ("snapkv", "kvzip", "expected_attention", "key_norm", "random")


def score_tokens(
    scorer: str,
    q: Float[Array, "Q H D"],
    k: Float[Array, "T K D"],
    *,
    q_positions: Int[Array, "Q"],
    k_positions: Int[Array, "T"],
    key: Array | None = None,
) -> Float[Array, "K T"]:
    """Scores by the scorer of a name, with its default options.

    Args:
      scorer: one of ``SCORERS``.
      q: queries that look at the keys: the last ones of the prompt, or those of its repetition for
        ``kvzip``. ``key_norm`` and ``random`` ignore them.
      k: keys of one layer.
      q_positions: position of each query, -1 for padding.
      k_positions: position of each key, -1 for padding.
      key: of ``random``, one for each layer.

    Raises:
      ConfigError: there is no such scorer, or ``random`` has no key.
    """
    if scorer == "key_norm":
        return key_norm(k, k_positions=k_positions)
    if scorer == "random":
        if key is None:
            raise ConfigError("The scorer 'random' needs a key.")
        return random(key, k.shape[1], k_positions=k_positions)
    by_queries = {"snapkv": snapkv, "kvzip": kvzip, "expected_attention": expected_attention}
    if scorer not in by_queries:
        raise ConfigError(f"There is no scorer {scorer!r}; choose one of {', '.join(SCORERS)}.")
    return by_queries[scorer](q, k, q_positions=q_positions, k_positions=k_positions)


def snapkv(
    q: Float[Array, "Q H D"],
    k: Float[Array, "T K D"],
    *,
    q_positions: Int[Array, "Q"],
    k_positions: Int[Array, "T"],
    pool: int = 7,
    scale: float | None = None,
) -> Float[Array, "K T"]:
    """Mean attention from an observation window, averaged over ``pool`` neighbouring keys.

    Args:
      q: queries of the window, usually the last 32 of the prompt.
      k: keys.
      q_positions: position of each query, -1 for padding.
      k_positions: position of each key, in the order of the tokens, -1 for padding.
      pool: odd number of keys; 1 leaves the scores as they are.
      scale: factor of the dot products; ``D ** -0.5`` where None.

    Raises:
      ConfigError: ``pool`` is even or not positive.

    Source: SnapKV (arXiv:2404.14469).
    """
    if pool < 1 or pool % 2 == 0:
        raise ConfigError(f"pool is {pool}; give an odd positive number of tokens.")
    weights = _attention(q, k, q_positions, k_positions, scale)
    n_queries = jnp.maximum(jnp.sum(q_positions >= 0), 1).astype(jnp.float32)
    mean = weights.sum(axis=2).mean(axis=1) / n_queries
    valid = (k_positions >= 0)[None, :]
    counts = _window_sum(valid.astype(jnp.float32), pool)
    return _hide_padding(
        _window_sum(jnp.where(valid, mean, 0.0), pool) / jnp.maximum(counts, 1.0), k_positions
    )


def kvzip(
    q: Float[Array, "Q H D"],
    k: Float[Array, "T K D"],
    *,
    q_positions: Int[Array, "Q"],
    k_positions: Int[Array, "T"],
    scale: float | None = None,
) -> Float[Array, "K T"]:
    """Largest attention that a key gets while the model repeats the context.

    The model is fed the context, a request to repeat it, and the context again; the queries are
    those of the repetition, the keys those of all of it, so the softmax is that of the forward
    pass. What several chunks of the repetition score is joined by ``jnp.maximum``. Nothing of a
    later question is known to it.

    Args:
      q: queries of the repetition.
      k: keys of the context and of what follows it; the caller takes the context's scores.
      q_positions: position of each query, -1 for padding.
      k_positions: position of each key, -1 for padding.
      scale: factor of the dot products; ``D ** -0.5`` where None.

    Source: KVzip (arXiv:2505.23416).
    """
    weights = _attention(q, k, q_positions, k_positions, scale)
    return _hide_padding(weights.max(axis=(1, 2)), k_positions)


def expected_attention(
    q: Float[Array, "Q H D"],
    k: Float[Array, "T K D"],
    *,
    q_positions: Int[Array, "Q"],
    k_positions: Int[Array, "T"],
    values: Float[Array, "T K D"] | None = None,
    scale: float | None = None,
) -> Float[Array, "K T"]:
    """Attention expected from a normally distributed query, times the length of the value.

    ``E[exp(s q k)] = exp(s mu k + s² k' Sigma k / 2)``, normalised over the keys. Mean and
    covariance are those of the queries given, after position encoding, so that no model has to
    tell how it encodes positions.

    Args:
      q: queries that stand for those to come, usually the last of the prompt.
      k: keys.
      q_positions: position of each query, -1 for padding.
      k_positions: position of each key, -1 for padding.
      values: values, whose norm weighs the scores; all equal where None.
      scale: factor of the dot products; ``D ** -0.5`` where None.

    Source: Expected Attention (arXiv:2510.00636).
    """
    n_kv_heads = k.shape[1]
    scale = _scale(k, scale)
    grouped = _by_kv_head(q, n_kv_heads)
    real = (q_positions >= 0).astype(jnp.float32)[None, None, :, None]
    n_queries = jnp.maximum(real.sum(), 1.0)
    # Not 0 * q: a padding query may hold anything, NaN included.
    grouped = jnp.where(real > 0, grouped, 0.0)
    mean = grouped.sum(axis=2) / n_queries
    centred = (grouped - mean[:, :, None, :]) * real
    covariance = jnp.einsum("kgqd,kgqe->kgde", centred, centred) / n_queries
    keys = k.astype(jnp.float32)
    exponent = scale * jnp.einsum("kgd,tkd->kgt", mean, keys)
    exponent += 0.5 * scale**2 * jnp.einsum("tkd,kgde,tke->kgt", keys, covariance, keys)
    exponent = jnp.where((k_positions >= 0)[None, None, :], exponent, -jnp.inf)
    expected = _softmax(exponent).mean(axis=1)
    if values is not None:
        expected *= jnp.linalg.norm(values.astype(jnp.float32), axis=-1).T
    return _hide_padding(expected, k_positions)


def key_norm(k: Float[Array, "T K D"], *, k_positions: Int[Array, "T"]) -> Float[Array, "K T"]:
    """Minus the length of the key: short keys draw attention (Devoto et al., arXiv:2406.11430)."""
    return _hide_padding(-jnp.linalg.norm(k.astype(jnp.float32), axis=-1).T, k_positions)


def random(key: Array, n_kv_heads: int, *, k_positions: Int[Array, "T"]) -> Float[Array, "K T"]:
    """Uniform scores in [0, 1) that depend on key, head and position only, not on chunks."""
    draw = jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(key, p), (n_kv_heads,)))
    return _hide_padding(draw(jnp.maximum(k_positions, 0)).T, k_positions)


def protect(
    scores: Float[Array, "*heads T"],
    positions: Int[Array, "T"],
    n: int | Int[Array, ""],
    *,
    sinks: int,
    window: int,
) -> Float[Array, "*heads T"]:
    """Scores with ``+inf`` for the first ``sinks`` and the last ``window`` of ``n`` tokens.

    They are then chosen first and count against the budget.
    """
    forced = (positions >= 0) & ((positions < sinks) | (positions >= n - window))
    return jnp.where(forced.reshape((1,) * (scores.ndim - 1) + (-1,)), jnp.inf, scores)


def top_k_mask(
    scores: Float[Array, "heads T"], budgets: Int[Array, "heads"]
) -> Bool[Array, "heads T"]:
    """Which tokens each head keeps: the best by score, of equal ones the first.

    A head keeps fewer than its budget only where there are fewer tokens; padding (``-inf``) never.
    """
    return (_ranks(scores) < budgets[:, None]) & (scores > -jnp.inf)


def top_k_indices(
    scores: Float[Array, "heads T"], budgets: Int[Array, "heads"], capacity: int
) -> Int[Array, "heads capacity"]:
    """The tokens of ``top_k_mask`` as ascending int32 indices, then ``T`` to fill the capacity.

    ``T`` is out of range: gather and scatter with a mode that drops it.
    """
    n_tokens = scores.shape[1]
    indices = jnp.arange(n_tokens, dtype=jnp.int32)[None, :]
    kept = jnp.where(top_k_mask(scores, budgets), indices, n_tokens)
    kept = jnp.sort(kept, axis=1)[:, :capacity]
    return jnp.pad(kept, ((0, 0), (0, capacity - kept.shape[1])), constant_values=n_tokens)


def global_top_k_mask(
    scores: Float[Array, "L K T"], total: int | Int[Array, ""]
) -> Bool[Array, "L K T"]:
    """Which tokens stay where all heads of all layers compete for ``total`` places.

    Ties go by layer, head, index. Protected tokens (``+inf``) stay first.
    """
    flat = scores.reshape(1, -1)
    return top_k_mask(flat, jnp.asarray(total, jnp.int32).reshape(1)).reshape(scores.shape)


def check_scores(scores: Float[Array, "..."] | Float[np.ndarray, "..."]) -> None:
    """Refuses scores that would choose tokens at random.

    Raises:
      ConfigError: a score is NaN.
    """
    n = int(np.isnan(np.asarray(scores)).sum())
    if n:
        raise ConfigError(
            f"{n} of {np.size(scores)} scores are NaN; the keys, queries or gate weights that they "
            "come from are not finite."
        )


def _attention(
    q: Float[Array, "Q H D"],
    k: Float[Array, "T K D"],
    q_positions: Int[Array, "Q"],
    k_positions: Int[Array, "T"],
    scale: float | None,
) -> Float[Array, "K G Q T"]:
    """Causal attention weights, float32; 0 for padding."""
    logits = _scale(k, scale) * jnp.einsum(
        "kgqd,tkd->kgqt", _by_kv_head(q, k.shape[1]), k.astype(jnp.float32)
    )
    seen = (k_positions >= 0)[None, :] & (k_positions[None, :] <= q_positions[:, None])
    return _softmax(jnp.where(seen[None, None], logits, -jnp.inf))


def _softmax(logits: Float[Array, "*rows T"]) -> Float[Array, "*rows T"]:
    """Softmax over the last axis; all zeros, not NaN, where every logit is ``-inf``."""
    top = logits.max(axis=-1, keepdims=True)
    powers = jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / jnp.where(total == 0, 1.0, total)


def _scale(k: Float[Array, "T K D"], scale: float | None) -> float:
    return float(k.shape[-1]) ** -0.5 if scale is None else scale


def _by_kv_head(q: Float[Array, "Q H D"], n_kv_heads: int) -> Float[Array, "K G Q D"]:
    grouped = q.astype(jnp.float32).reshape(q.shape[0], n_kv_heads, -1, q.shape[-1])
    return grouped.transpose(1, 2, 0, 3)


def _window_sum(values: Float[Array, "rows T"], size: int) -> Float[Array, "rows T"]:
    """Sum of the ``size`` neighbours around each element, as far as there are any."""
    return jax.lax.reduce_window(values, 0.0, jax.lax.add, (1, size), (1, 1), "SAME")


def _hide_padding(scores: Float[Array, "K T"], k_positions: Int[Array, "T"]) -> Float[Array, "K T"]:
    return jnp.where((k_positions >= 0)[None, :], scores, -jnp.inf)


def _ranks(scores: Float[Array, "heads T"]) -> Int[Array, "heads T"]:
    """Place of each token in the order of falling score; equal scores in the order of tokens."""
    order = jnp.argsort(scores, axis=1, stable=True, descending=True)
    return jnp.argsort(order, axis=1)
