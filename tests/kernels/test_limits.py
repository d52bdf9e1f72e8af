"""What the GPU kernels of segment attention refuse, and the sentence that says why."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.segment_attention import build_schedule
from pallas_kernels.segment_attention.limits import mosaic_refuses, stages, triton_refuses

SCHEDULE = build_schedule(
    np.array([(0, 64, 0, 4)], np.int32),
    n_rows=4,
    n_slots=256,
    n_kv_heads=2,
    group=2,
    row_tile=128,
    kv_tile=128,
    n_workers=2,
)
DEFAULT = {"scale": 0.1, "slots": None, "row_positions": None}


def refusal(head_dim=128, dtype="bfloat16", n_slots=256, schedule=SCHEDULE, **options):
    q = jax.ShapeDtypeStruct((4, 4, head_dim), dtype)
    k = jax.ShapeDtypeStruct((n_slots, 2, head_dim), dtype)
    return mosaic_refuses(q, k, schedule, **DEFAULT | options)


def test_what_fits_is_not_refused():
    assert refusal() is None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"schedule": None}, "needs a schedule"),
        ({"slots": jnp.zeros(3, jnp.int32)}, "contiguous slots"),
        ({"row_positions": jnp.zeros(4, jnp.int32)}, "needs a schedule with diagonals"),
        ({"schedule": dataclasses.replace(SCHEDULE, causal=True)}, "no row_positions are given"),
        ({"scale": 0.0}, "positive scale, not 0.0"),
        ({"dtype": "float32"}, "not float32 and float32"),
        ({"head_dim": 72}, "multiple of 16 and at most 256, not 72"),
        ({"head_dim": 272}, "multiple of 16 and at most 256, not 272"),
        ({"schedule": dataclasses.replace(SCHEDULE, row_tile=32)}, "64 or 128 folded rows, not 32"),
        ({"schedule": dataclasses.replace(SCHEDULE, kv_tile=96)}, "multiple of 64, not 96"),
        ({"head_dim": 256}, "does not fit shared memory"),
        ({"n_slots": 252}, "multiple of 8 slots"),
        ({"n_slots": 64}, "at least a key tile, not 64"),
    ],
)
def test_mosaic_says_why(case, message):
    reason = refusal(**case)
    assert reason is not None
    assert message in reason


def test_the_ring_of_tiles_fits_the_shared_memory_of_a_block():
    queries, tile = 128 * 128 * 2, 2 * 128 * 128 * 2
    assert stages(SCHEDULE, 128) == 3
    assert queries + 3 * tile <= 227 * 1024


def test_triton_needs_a_schedule_with_the_mask_asked_for():
    q, k = (jax.ShapeDtypeStruct((4, 2, 64), jnp.float32) for _ in range(2))
    causal = dataclasses.replace(SCHEDULE, causal=True)
    rows = jnp.zeros(4)
    assert "needs a schedule" in (triton_refuses(q, k, None, row_positions=None) or "")
    assert "diagonals" in (triton_refuses(q, k, SCHEDULE, row_positions=rows) or "")
    assert "no row_positions" in (triton_refuses(q, k, causal, row_positions=None) or "")
    assert triton_refuses(q, k, SCHEDULE, row_positions=None) is None
    assert triton_refuses(q, k, causal, row_positions=rows) is None
