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


def slots_read(schedule, row, head, group=SHAPE["group"]):
    """Slots that the partials of a row and head cover, in any order, repeats included."""
    slots = []
    for place in schedule.places[row, head, : schedule.counts[row, head]]:
        item, folded = divmod(int(place), schedule.row_tile)
        fields = schedule.items[item]
        assert fields[plan.HEAD] == head
        assert fields[plan.ROW] + folded == row * group
        assert folded + group <= schedule.row_tile
        end = fields[plan.KV_END]
        if schedule.causal:
            end = min(end, row + fields[plan.DIAGONAL] + 1)
        slots += range(fields[plan.KV_BEGIN], end)
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


@pytest.mark.parametrize("group", [1, 3, 4, 5, 16, 57])
def test_row_tiles_of_any_group_start_aligned_and_inside_the_rows_read(group):
    schedule = build(NESTED, group=group)
    for row in range(SHAPE["n_rows"]):
        seen = [slot for slot in slots_read(schedule, row, 1, group) if slot < 1000]
        assert sorted(seen) == list(range(1000))
    rows = plan.folded_rows(SHAPE["n_rows"], group, SHAPE["row_tile"])
    assert rows >= max(SHAPE["n_rows"] * group, SHAPE["row_tile"])
    for fields in schedule.items[: schedule.worker_starts[-1]]:
        assert fields[plan.ROW] % 8 == 0
        assert fields[plan.ROW] + SHAPE["row_tile"] <= rows


CAUSAL = [(0, 1000, 0, 20), (1003, 500, 20, 15), (2000, 8, 35, 5)]
DIAGONALS = [970, 1001, 2100]  # the first row of the second sees no key, the third's see all


@pytest.mark.parametrize("n_workers", [1, 7, 132])
def test_a_causal_row_reads_up_to_its_own_last_slot(n_workers):
    schedule = build(CAUSAL, n_workers=n_workers, diagonals=np.array(DIAGONALS))
    for (base, length, first, rows), diagonal in zip(CAUSAL, DIAGONALS, strict=True):
        for i in range(rows):
            expected = list(range(base, min(base + length, diagonal + i + 1)))
            assert sorted(slots_read(schedule, first + i, 0)) == expected


def test_key_tiles_that_no_row_sees_are_left_out():
    schedule = build([(0, 4096, 0, 16)], diagonals=np.array([100]), n_workers=1)
    items = schedule.items[: schedule.worker_starts[-1]]
    assert (items[:, plan.STEPS] == 2).all()  # the last row sees slot 115
    assert (items[:, plan.MASKED] == 1).all()  # every row sees the first 64


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
        tuple(array.shape for array in (s.items, s.worker_starts, s.places, s.counts))
        for s in (build(NESTED, capacity=capacity), build([(0, 9, 0, 1)], capacity=capacity))
    }
    assert len(shapes) == 1


def test_a_plan_beyond_the_capacity_is_refused():
    capacity = plan.Capacity(items=9, pieces=9)
    with pytest.raises(ValueError, match="more than Capacity"):
        build(NESTED, capacity=capacity)


def test_few_pieces_are_kept_to():
    capacity = plan.Capacity(items=64, pieces=3)
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
