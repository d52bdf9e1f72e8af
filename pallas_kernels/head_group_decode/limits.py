"""What the Mosaic decode of head groups can run: enters arguments, leaves a reason or None.

Apart from the kernel, so that a process without a GPU asks without importing Pallas.
"""

import jax.numpy as jnp

from pallas_kernels.split_kv_decode.limits import QUERY_ROWS, TILE_ROWS, stages


def mosaic_refuses(q, k, *, group, page_size, scale) -> str | None:
    """Why the Mosaic kernel cannot run on these arguments, or None."""
    head_dim = q.shape[-1]
    if scale <= 0:
        return f"it needs a positive scale, not {scale}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return f"it runs bfloat16 or float16, the same for q and k, not {q.dtype} and {k.dtype}"
    if head_dim % 16 or head_dim > 256:
        return f"it needs a head dim that is a multiple of 16 and at most 256, not {head_dim}"
    if group > QUERY_ROWS:
        return f"it needs at most {QUERY_ROWS} query heads for a KV head, not {group}"
    if page_size % 8 or max(page_size, TILE_ROWS) % min(page_size, TILE_ROWS):
        return f"it needs pages of 8, 16, 32 or a multiple of {TILE_ROWS} tokens, not {page_size}"
    if stages(head_dim) < 2:
        return f"two tiles of keys and values at head dim {head_dim} do not fit shared memory"
    return None


def padded_group(group: int) -> int:
    """Query rows of a KV head in whole tiles of the swizzled layout."""
    return -(-group // 8) * 8
