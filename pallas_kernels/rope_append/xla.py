"""RoPE and KV append in XLA: the specification."""

import jax.numpy as jnp

from pallas_kernels.append import xla as append


def rotate(x, cos, sin):  # [B, heads, D], [B, D / 2] ×2
    """Turn each pair ``(x[i], x[i + D/2])`` by its angle, in float32."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_append(k, v, qkv, cos, sin, slots):  # [N, K, D] ×2, [B, K, G + 2, D], [B, D / 2] ×2, [B]
    """See ``api.rope_append``."""
    n_rows, _, _, head_dim = qkv.shape
    q = qkv[:, :, :-2].reshape(n_rows, -1, head_dim)
    k, v = append.append_kv(k, v, rotate(qkv[:, :, -2], cos, sin), qkv[:, :, -1], slots)
    return k, v, rotate(q, cos, sin)
