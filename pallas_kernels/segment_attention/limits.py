"""What the GPU kernels of segment attention can run: enters arguments, leaves a reason or None.

Apart from the kernels, so that a process without a GPU asks without importing Pallas.
"""

import jax.numpy as jnp

from pallas_kernels.limits import head_refusal
from pallas_kernels.segment_attention.schedule import ALIGNMENT

WARPGROUP_ROWS = 64
SHARED_MEMORY_BYTES = 227 * 1024 - 2048  # of a block, less barriers and reduction scratch


def mosaic_refuses(q, k, schedule, *, scale, slots, row_positions) -> str | None:
    """Why this kernel cannot run on these arguments, or None."""
    head_dim = q.shape[-1]
    if schedule is None:
        return "it needs a schedule (build_schedule)"
    if (reason := _mask_refusal(schedule, row_positions)) is not None:
        return reason
    if slots is not None:
        return "it reads contiguous slots only"
    if scale <= 0:
        return f"it needs a positive scale, not {scale}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k.dtype:
        return f"it runs bfloat16 or float16, the same for q and k, not {q.dtype} and {k.dtype}"
    if head_dim % 16 or head_dim > 256:
        return f"it needs a head dim that is a multiple of 16 and at most 256, not {head_dim}"
    if schedule.row_tile not in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS):
        return f"it needs a row tile of 64 or 128 folded rows, not {schedule.row_tile}"
    if schedule.kv_tile % 64:
        return f"it needs a key tile that is a multiple of 64, not {schedule.kv_tile}"
    if stages(schedule, head_dim) < 2:
        return f"a key tile of {schedule.kv_tile} at head dim {head_dim} does not fit shared memory"
    if k.shape[0] % ALIGNMENT or k.shape[0] < schedule.kv_tile:
        return f"it needs a pool of a multiple of 8 slots, at least a key tile, not {k.shape[0]}"
    return None


def triton_refuses(q, k, schedule, *, row_positions) -> str | None:
    """Why this kernel cannot run on these arguments, or None."""
    if schedule is None:
        return "it needs a schedule (build_schedule)"
    return _mask_refusal(schedule, row_positions) or head_refusal(q, k)


def _mask_refusal(schedule, row_positions) -> str | None:
    """Why the schedule does not have the mask that the arguments ask for, or None."""
    if row_positions is not None and not schedule.causal:
        return "for a causal mask it needs a schedule with diagonals (build_schedule)"
    if row_positions is None and schedule.causal:
        return "its schedule is causal, and no row_positions are given"
    return None


def stages(schedule, head_dim):
    """Key and value tiles in flight: as many as fit beside the queries, at most four."""
    left = SHARED_MEMORY_BYTES - schedule.row_tile * head_dim * 2
    return min(4, left // (2 * schedule.kv_tile * head_dim * 2))
