"""Staging with Pallas Triton: one program copies a few tokens, keys and values."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks

TOKENS = 8  # of a program


def stage_kv(  # [N, K, D] ×2, [T, K, D] ×2, [S], []
    k, v, new_k, new_v, slots, n, *, interpret=False
):
    """See ``api.stage_kv``. Programs behind ``n`` touch nothing."""
    _, n_kv_heads, head_dim = k.shape
    size, width = slots.shape[0], n_kv_heads * head_dim
    copies = blocks.call(
        _kernel,
        out_shape=tuple(jax.ShapeDtypeStruct((size, width), x.dtype) for x in (k, v)),
        grid=(-(-size // TOKENS),),
        num_warps=8,
        num_stages=1,
        interpret=interpret,
    )(*(x.reshape(-1, width) for x in (k, v, new_k, new_v)), slots, n.reshape(1))
    return tuple(x.reshape(size, n_kv_heads, head_dim) for x in copies)


def _kernel(
    k_ref,  # [N, K · D]
    v_ref,  # [N, K · D]
    new_k_ref,  # [T, K · D]
    new_v_ref,  # [T, K · D]
    slots_ref,  # [S]
    n_ref,  # [1]
    k_copy_ref,  # [S, K · D]
    v_copy_ref,  # [S, K · D]
):
    n_slots, width = k_ref.shape
    token = pl.program_id(0) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    used = token < n_ref[0]
    slot = plt.load(slots_ref.at[token], mask=used, other=0)
    column = jnp.arange(blocks.padded(width), dtype=jnp.int32)[None, :]
    mask = used[:, None] & (column < width)
    new = (slot >= n_slots)[:, None]
    for pool_ref, new_ref, copy_ref in (
        (k_ref, new_k_ref, k_copy_ref),
        (v_ref, new_v_ref, v_copy_ref),
    ):
        old = plt.load(pool_ref.at[slot[:, None], column], mask=mask & ~new, other=0.0)
        fresh = plt.load(new_ref.at[slot[:, None] - n_slots, column], mask=mask & new, other=0.0)
        plt.store(copy_ref.at[token[:, None], column], jnp.where(new, fresh, old), mask=mask)
