"""Segment attention in XLA: the specification. A loop over the work list, one tile at a time."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax


def segment_attention(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    segments,  # [C, 4]
    work,  # [W, 3]
    n_work,  # []
    *,
    row_tile,
    kv_tile,
    scale,
    slots=None,  # [I]
    row_positions=None,  # [B]
    first_positions=None,  # [C]
):
    """See ``api.segment_attention``."""
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    group = n_heads // n_kv_heads
    n_indices = k.shape[0] if slots is None else slots.shape[0]
    row_tile, kv_tile = min(row_tile, n_rows), min(kv_tile, n_indices)
    q = q.reshape(n_rows, n_kv_heads, group, head_dim)

    def read(x, start):
        if slots is None:
            return lax.dynamic_slice_in_dim(x, start, kv_tile)
        return x[lax.dynamic_slice_in_dim(slots, start, kv_tile)]

    def tile(i, state):
        segment, row_offset, kv_offset = work[i]
        base, length, first_row, rows = segments[segment]
        row_lo, row_hi = (
            first_row + row_offset,
            first_row + jnp.minimum(row_offset + row_tile, rows),
        )
        kv_lo, kv_hi = base + kv_offset, base + jnp.minimum(kv_offset + kv_tile, length)
        # A tile that would pass the end of an array is moved back; the mask keeps its own part.
        row_start = jnp.minimum(row_lo, n_rows - row_tile)
        kv_start = jnp.minimum(kv_lo, n_indices - kv_tile)
        row = row_start + jnp.arange(row_tile, dtype=jnp.int32)
        index = kv_start + jnp.arange(kv_tile, dtype=jnp.int32)
        row_mask = (row >= row_lo) & (row < row_hi)
        kv_mask = (index >= kv_lo) & (index < kv_hi)
        mask = row_mask[:, None] & kv_mask[None, :]
        if row_positions is not None and first_positions is not None:
            position = first_positions[segment] + index - base
            mask &= position[None, :] <= row_positions[row][:, None]

        keys, values = read(k, kv_start), read(v, kv_start)
        seen = mask.any(axis=0)[:, None, None]
        values = jnp.where(seen, values, 0)  # 0 × NaN of an unused slot is NaN
        queries = lax.dynamic_slice_in_dim(q, row_start, row_tile)
        scores = jnp.einsum("rkgd,tkd->kgrt", queries, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(mask[None, None], scores * scale, -jnp.inf)

        def weigh(weights):
            weights = weights.astype(values.dtype)
            return jnp.einsum("kgrt,tkd->kgrd", weights, values, preferred_element_type=jnp.float32)

        old = tuple(lax.dynamic_slice_in_dim(x, row_start, row_tile, axis=2) for x in state)
        new = online_softmax.update(old, scores, weigh)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, part, row_start, axis=2)
            for x, part in zip(state, new, strict=True)
        )

    state = online_softmax.initial((n_kv_heads, group, n_rows), head_dim)
    out, lse = online_softmax.finish(lax.fori_loop(0, n_work, tile, state))
    return (
        out.transpose(2, 0, 1, 3).reshape(n_rows, n_heads, head_dim),
        lse.transpose(2, 0, 1).reshape(n_rows, n_heads),
    )
