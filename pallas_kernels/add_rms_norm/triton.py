"""Residual sum and RMS norm with Pallas Triton: one program a row, the row in registers."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks


def add_rms_norm(x, delta, weight, *, eps, interpret=False):  # [T, size] ×2, [size]
    """See ``api.add_rms_norm``."""
    rows, size = x.shape
    return blocks.call(
        functools.partial(_kernel, eps=eps),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        grid=(rows,),
        num_warps=8 if size > 2048 else 4,
        num_stages=1,
        interpret=interpret,
    )(x, delta, weight)


def _kernel(
    x_ref,  # [T, size]
    delta_ref,  # [T, size]
    weight_ref,  # [size]
    y_ref,  # [T, size]
    norm_ref,  # [T, size]
    *,
    eps,
):
    row, size = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(blocks.padded(size), dtype=jnp.int32)
    real = column < size
    x = plt.load(x_ref.at[row, column], mask=real, other=0.0)
    delta = plt.load(delta_ref.at[row, column], mask=real, other=0.0)
    weight = plt.load(weight_ref.at[column], mask=real, other=0.0)
    y = (x.astype(jnp.float32) + delta.astype(jnp.float32)).astype(y_ref.dtype)
    wide = y.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    plt.store(y_ref.at[row, column], y, mask=real)
    norm = wide * scale * weight.astype(jnp.float32)
    plt.store(norm_ref.at[row, column], norm.astype(norm_ref.dtype), mask=real)
