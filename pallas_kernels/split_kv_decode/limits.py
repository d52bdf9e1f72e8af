"""What the Mosaic decode can run: enters arguments, leaves a reason or None.

Apart from the kernel, so that a process without a GPU asks without importing Pallas.
"""

import jax.numpy as jnp

QUERY_ROWS = 64  # rows of a warpgroup's product: all query heads of one row of the batch
TILE_ROWS = 64  # (token, KV head) pairs of one tile of keys
ITEMS = 2  # rows or parts of rows that a block takes at the same time
SHARED_MEMORY_BYTES = 224 * 1024  # of a block, less barriers


def mosaic_refuses(q, k, *, page_size, scale, splits) -> str | None:
    """Why the Mosaic kernel cannot run on these arguments, or None."""
    n_heads, head_dim = q.shape[1:]
    if scale <= 0:
        return f"it needs a positive scale, not {scale}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return f"it runs bfloat16 or float16, the same for q and k, not {q.dtype} and {k.dtype}"
    if head_dim % 16 or head_dim > 256:
        return f"it needs a head dim that is a multiple of 16 and at most 256, not {head_dim}"
    if n_heads % 8 or n_heads > QUERY_ROWS:
        return f"it needs a multiple of 8 query heads, at most {QUERY_ROWS}, not {n_heads}"
    n_kv_heads = k.shape[1]
    if TILE_ROWS % n_kv_heads or page_size * n_kv_heads % 8:
        return (
            f"it needs KV heads that divide {TILE_ROWS} and pages of a multiple of 8 (token, KV "
            f"head) pairs, not {page_size} tokens of {n_kv_heads} heads"
        )
    small, large = sorted((page_size, TILE_ROWS // n_kv_heads))
    if large % small:
        return f"pages of {page_size} tokens and tiles of {TILE_ROWS // n_kv_heads} do not fit"
    if stages(head_dim) < 2:
        return f"two tiles of keys and values at head dim {head_dim} do not fit shared memory"
    if splits is not None and len(set(splits)) > 1:
        return f"it reads all heads of a token together and splits them alike, not {splits}"
    return None


def stages(head_dim: int) -> int:
    """Key and value tiles in flight: as many as fit beside the queries, at most six."""
    left = SHARED_MEMORY_BYTES // ITEMS - QUERY_ROWS * head_dim * 2
    return min(6, left // (2 * TILE_ROWS * head_dim * 2))
