"""RMS norm of heads, RoPE and KV append in XLA: the specification."""

import jax.numpy as jnp

from pallas_kernels.add_rms_norm.xla import rms_norm
from pallas_kernels.append import xla as append


def rotate(x, cos, sin):  # [B, heads, D], [B, D / 2] ×2
    """Turn each pair ``(x[i], x[i + D/2])`` by its angle, in float32."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_append(k, v, qkv, cos, sin, slots, norms, *, eps):
    """See ``api.rope_append``."""
    n_rows, _, _, head_dim = qkv.shape
    q, new_k = qkv[:, :, :-2].reshape(n_rows, -1, head_dim), qkv[:, :, -2]
    if norms is not None:
        q, new_k = rms_norm(q, norms[0], eps=eps), rms_norm(new_k, norms[1], eps=eps)
    k, v = append.append_kv(k, v, rotate(new_k, cos, sin), qkv[:, :, -1], slots)
    return k, v, rotate(q, cos, sin)
