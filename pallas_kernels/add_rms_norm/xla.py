"""RMS norm, and residual sum and RMS norm, in XLA: the specification."""

import jax.numpy as jnp
from jax import lax


def rms_norm(x, weight, *, eps):  # [..., size], [size]
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, in float32, in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * scale * weight).astype(x.dtype)


def add_rms_norm(x, delta, weight, *, eps):  # [T, size] ×2, [size]
    """See ``api.add_rms_norm``."""
    y = x + delta
    return y, rms_norm(y, weight, eps=eps)
