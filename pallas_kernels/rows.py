"""Folded rows: enters the queries of the batch, leaves them as the GPU kernels read them."""

import jax.numpy as jnp


def fold_rows(q, n_kv_heads, least=0):
    """``[B, H, D]`` to ``[K, M, D]``: row ``b · G + g`` is head ``g`` of the group in row ``b``.

    A transposition and nothing more, so that the compiler does it where the queries are made.
    Where there are fewer than ``least`` rows, zeros follow.
    """
    n_rows, n_heads, head_dim = q.shape
    group = n_heads // n_kv_heads
    q = q.reshape(n_rows, n_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
    q = q.reshape(n_kv_heads, n_rows * group, head_dim)
    missing = max(0, least - n_rows * group)
    return jnp.pad(q, ((0, 0), (0, missing), (0, 0))) if missing else q
