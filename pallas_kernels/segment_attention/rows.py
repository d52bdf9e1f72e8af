"""Rows of a schedule: enters the queries of the batch, leaves them in folded row tiles."""

import jax.numpy as jnp

from pallas_kernels.segment_attention.schedule import Schedule


def gather_rows(q, schedule: Schedule):
    """Fold queries into row tiles: ``[B, H, D]`` to ``[T, K, row_tile, D]``, padded with zeros.

    Row ``r · G + g`` of a tile is head ``g`` of the group in the tile's row ``r``.
    """
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads = schedule.pieces.shape[1]
    rows = jnp.asarray(schedule.tile_rows)  # [T, R]
    tiles = q.reshape(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)[rows]
    tiles = tiles.transpose(0, 2, 1, 3, 4).reshape(rows.shape[0], n_kv_heads, -1, head_dim)
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, schedule.row_tile - tiles.shape[2]), (0, 0)))
