"""Blocks of attention for the Pallas Triton kernels: enters loaded tiles, leaves the running state.

Block shapes are powers of two, and every dimension of a product is at least 16: head dims and groups
are padded, and the padding is masked. Scores are kept in base 2; ``finish`` returns natural logs.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOG2E = math.log2(math.e)


def padded(n: int, least: int = 16) -> int:
    """The block size that holds ``n``: a power of two, at least ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


def initial(rows, head_dim):
    """State ``(out, top, total)`` of rows that have seen no score."""
    return (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def update(state, q, keys, values, mask, scale):
    """Take in a block of keys.

    Args:
      state: ``(out [M, D], top [M], total [M])``.
      q: ``[M, D]``.
      keys: ``[T, D]``, 0 where masked.
      values: ``[T, D]``, 0 where masked.
      mask: ``[T]``, of which at least one key counts, or ``[M, T]``, where rows may see none.
      scale: factor of the scores, times log2(e).
    """
    out, top, total = state
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = plt.dot(q, keys, trans_b=True, precision=precision) * scale
    scores = jnp.where(mask if mask.ndim == 2 else mask[None, :], scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    finite_top = jnp.where(new_top == -jnp.inf, 0.0, new_top) if mask.ndim == 2 else new_top
    weights = jnp.exp2(scores - finite_top[:, None])
    decay = jnp.exp2(top - finite_top)
    product = plt.dot(weights.astype(values.dtype), values, precision=precision)
    return out * decay[:, None] + product, new_top, total * decay + jnp.sum(weights, axis=1)


def finish(state):
    """``(out, lse)`` of a state: normalised, natural log; ``(0, -inf)`` where it is empty."""
    out, top, total = state
    empty = total == 0.0
    divisor = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(divisor)) * math.log(2.0))
    return out / divisor[:, None], lse


def call(kernel, *, num_warps, num_stages, interpret, **options):
    """``pl.pallas_call`` on the Triton backend, named after the operation in profiles."""
    function = getattr(kernel, "func", kernel)
    return pl.pallas_call(
        kernel,
        name="_".join(function.__module__.split(".")[1:]),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        **options,
    )
