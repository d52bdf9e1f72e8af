"""The schedule of the GPU kernels: every key of every row once, in arrays of the promised shape."""

from typing import Any

import numpy as np
import pytest

from pallas_kernels.segment_attention import build_schedule, capacity_for
from pallas_kernels.segment_attention import schedule as plan

SHAPE: dict[str, Any] = {
    "n_rows": 40,
    "n_slots": 4096,
    "n_kv_heads": 2,
    "group": 4,
    "row_tile": 64,
    "kv_tile": 64,
}
NESTED = [(0, 1000, 0, 40), (1003, 77, 3, 20), (1080, 1, 10, 1), (2048, 0, 0, 5), (4000, 96, 39, 1)]


def build(segments, *, n_workers=7, **more: Any):
    return build_schedule(np.array(segments, np.int32), n_workers=n_workers, **SHAPE | more)


def slots_read(schedule, row, head):
    """Slots that the partials of a row and head cover, in any order, repeats included."""
    slots = []
    for place in schedule.pieces[row, head, : schedule.counts[row, head]]:
        item, folded = divmod(int(place), schedule.row_tile)
        fields = schedule.items[item]
        assert fields[plan.HEAD] == head
        assert schedule.tile_rows[fields[plan.TILE], folded // SHAPE["group"]] == row
        assert folded % SHAPE["group"] == 0
        slots += range(fields[plan.KV_BEGIN], fields[plan.KV_END])
    return slots


@pytest.mark.parametrize("n_workers", [1, 7, 132])
def test_partials_of_a_row_cover_its_keys_once(n_workers):
    schedule = build(NESTED, n_workers=n_workers)
    for row in range(SHAPE["n_rows"]):
        expected = [
            slot
            for base, length, first, rows in NESTED
            if first <= row < first + rows
            for slot in range(base, base + length)
        ]
        for head in range(SHAPE["n_kv_heads"]):
            assert sorted(slots_read(schedule, row, head)) == sorted(expected)


def test_every_item_has_one_worker():
    schedule = build(NESTED)
    assert schedule.worker_starts[0] == 0
    assert (np.diff(schedule.worker_starts) >= 0).all()
    used = schedule.items[: schedule.worker_starts[-1]]
    assert (used[:, plan.STEPS] > 0).all()


def test_key_tiles_start_aligned_and_cover_their_range():
    schedule = build(NESTED)
    for fields in schedule.items[: schedule.worker_starts[-1]]:
        base, end = fields[plan.BASE], fields[plan.BASE] + fields[plan.STEPS] * SHAPE["kv_tile"]
        assert base % 8 == 0
        assert base <= fields[plan.KV_BEGIN] < fields[plan.KV_END] <= end
        ragged = base < fields[plan.KV_BEGIN] or fields[plan.KV_END] < end
        assert (fields[plan.MASKED] > 0) == ragged


def test_equal_work_is_spread_evenly():
    schedule = build([(0, 4096, 0, 40)], n_workers=12)
    steps = [
        schedule.items[a:b, plan.STEPS].sum()
        for a, b in zip(schedule.worker_starts[:-1], schedule.worker_starts[1:], strict=True)
    ]
    assert max(steps) <= 1.1 * sum(steps) / len(steps)


def test_capacity_fixes_the_shapes():
    capacity = capacity_for(
        n_rows=40, n_kv_heads=2, group=4, row_tile=64, n_workers=7, max_segments=5
    )
    shapes = {
        tuple(array.shape for array in (s.tile_rows, s.items, s.worker_starts, s.pieces, s.counts))
        for s in (build(NESTED, capacity=capacity), build([(0, 9, 0, 1)], capacity=capacity))
    }
    assert len(shapes) == 1


def test_a_plan_beyond_the_capacity_is_refused():
    capacity = plan.Capacity(tiles=3, items=99, pieces=9)
    with pytest.raises(ValueError, match="more than Capacity"):
        build(NESTED, capacity=capacity)


def test_few_pieces_are_kept_to():
    capacity = plan.Capacity(tiles=16, items=64, pieces=3)
    assert build([(0, 4096, 0, 16)], n_workers=64, capacity=capacity).counts.max() <= 3


def test_no_segment_gives_an_idle_schedule():
    schedule = build([(0, 0, 0, 0)])
    assert schedule.worker_starts[-1] == 0
    assert (schedule.counts == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"group": 65}, "does not fit a row tile"), ({"n_slots": 4097}, "multiple of 8")],
)
def test_sizes_that_the_kernel_cannot_take_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        build(NESTED, **change)
