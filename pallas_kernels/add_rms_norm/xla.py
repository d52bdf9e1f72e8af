"""Residual sum and RMS norm in XLA: the specification."""

import jax.numpy as jnp
from jax import lax


def add_rms_norm(x, delta, weight, *, eps):  # [T, size] ×2, [size]
    """See ``api.add_rms_norm``."""
    y = x + delta
    wide = y.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    norm = wide * lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32)[None, :]
    return y, norm.astype(x.dtype)
