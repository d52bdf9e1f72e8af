"""Softmax over scores that arrive in blocks: the running state of every XLA specification.

The state of a row is ``(out, top, total)``: the weighted values so far, the largest score, and the
sum of ``exp(score - top)``. An empty row holds ``(0, -inf, 0)`` and never makes a NaN.
"""

import jax.numpy as jnp


def initial(shape, head_dim):
    """State of rows that have seen no score. ``shape``: the rows, in any arrangement."""
    return (
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def update(state, scores, weigh):
    """Take in one block of scores.

    Args:
      state: ``(out, top, total)`` of shapes ``[..., D]``, ``[...]``, ``[...]``.
      scores: ``[..., T]`` float32, ``-inf`` where masked.
      weigh: ``[..., T]`` weights to ``[..., D]`` sums of values.
    """
    out, top, total = state
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    finite_top = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
    weights = jnp.exp(scores - finite_top[..., None])
    decay = jnp.exp(top - finite_top)
    return (
        out * decay[..., None] + weigh(weights),
        new_top,
        total * decay + jnp.sum(weights, axis=-1),
    )


def finish(state):
    """Return ``(out, lse)``: normalised output and natural log-sum-exp; ``(0, -inf)`` if empty."""
    out, top, total = state
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    out = jnp.where(empty[..., None], 0.0, out / divisor[..., None])
    return out, jnp.where(empty, -jnp.inf, top + jnp.log(divisor))
