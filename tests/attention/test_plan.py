"""Decode plan: which rows share which keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrain_jax import ConfigError, Segment, find_segments, make_plan
from kvgrain_jax.attention import HotPiece, KernelShape, plan_holds, segments_that_fit
from kvgrain_jax.attention.plan import Tiling, make_work_list, work_capacity

A, B, C = HotPiece(1, 0, 100), HotPiece(2, 128, 50), HotPiece(3, 256, 30)


def test_adjacent_rows_of_a_class_share_one_segment():
    assert find_segments([[A], [A], [B], [B], [B]]) == [
        Segment(0, 100, 0, 2),
        Segment(128, 50, 2, 3),
    ]


def test_row_without_a_prefix_has_no_segment():
    assert find_segments([[A], [], [B]]) == [Segment(0, 100, 0, 1), Segment(128, 50, 2, 1)]
    assert find_segments([[], []]) == []


def test_nested_prefixes_are_segments_one_behind_the_other():
    rows = [[A, B], [A, B], [A, C], [A]]
    assert find_segments(rows) == [
        Segment(0, 100, 0, 4),
        Segment(128, 50, 0, 2),
        Segment(256, 30, 2, 1),
    ]


def test_sharing_needs_the_same_outer_pieces():
    rows = [[A, C], [B, C]]
    assert Segment(256, 30, 0, 2) not in find_segments(rows)


def test_classes_are_told_apart_by_owner_not_by_place_or_length():
    rows = [[HotPiece(1, 0, 100)], [HotPiece(7, 0, 100)]]
    assert len(find_segments(rows)) == 2


def test_halves_of_a_split_slab_read_by_the_same_rows_become_one_segment():
    halves = [HotPiece(1, 0, 60), HotPiece(2, 60, 40)]
    assert find_segments([halves, halves]) == [Segment(0, 100, 0, 2)]


def test_halves_of_a_split_slab_read_by_different_rows_stay_apart():
    rows = [[HotPiece(1, 0, 60), HotPiece(2, 60, 40)], [HotPiece(1, 0, 60)]]
    assert find_segments(rows) == [Segment(0, 60, 0, 2), Segment(60, 40, 0, 1)]


def test_starts_count_the_tokens_that_segments_cover():
    segments = find_segments([[A, B], [A], []])
    plan = make_plan(segments, n_rows=4, n_slots=512, max_segments=4)
    assert plan.starts.tolist() == [150, 100, 0, 0]
    assert int(plan.n_segments) == 2


@pytest.mark.parametrize(
    "segment",
    [Segment(0, 10, 3, 2), Segment(60, 10, 0, 1), Segment(-1, 10, 0, 1), Segment(0, 0, 0, 1)],
)
def test_segment_outside_the_batch_or_the_pool_is_refused(segment):
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan([segment], n_rows=4, n_slots=64, max_segments=2)


def test_more_segments_than_the_plan_holds_are_refused():
    with pytest.raises(ConfigError, match="3 segments"):
        make_plan([Segment(0, 1, 0, 1)] * 3, n_rows=4, n_slots=64, max_segments=2)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=40))
def test_pieces_that_nest_too_deeply_for_the_kernels_are_left_to_the_pages(names):
    kernels = KernelShape(n_kv_heads=2, group=16, head_dim=128, n_workers=2)
    n_rows, max_segments = len(names), 6
    bases: dict[tuple[int, ...], int] = {}
    rows = []
    for path in sorted(names):
        nodes = [tuple(path[: depth + 1]) for depth in range(len(path))]
        rows.append([HotPiece(0, 128 * bases.setdefault(n, len(bases)), 100) for n in nodes])
    segments, kept = segments_that_fit(
        rows,
        lambda segments: plan_holds(segments, kernels, n_rows=n_rows, max_segments=max_segments),
    )
    plan = make_plan(
        segments,
        n_rows=n_rows,
        n_slots=128 * (len(bases) + 1),
        max_segments=max_segments,
        kernels=kernels,
    )
    assert plan.starts.tolist() == [100 * len(pieces) for pieces in kept]
    assert all(row[: len(pieces)] == pieces for row, pieces in zip(rows, kept, strict=True))


LENGTHS = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 40))
def test_work_list_covers_every_row_and_key_once(shapes, row_tile, kv_tile):
    segments, base, row = [], 0, 0
    for length, rows in shapes:
        segments.append(Segment(base, length, row, rows))
        base, row = base + length, row + rows
    tiling = Tiling(row_tile, kv_tile)
    capacity = work_capacity(tiling, row, base, len(segments))
    work = make_work_list(segments, tiling, capacity)
    seen = np.zeros((row, base), int)
    for i, row_offset, kv_offset in np.asarray(work.items)[: int(work.n_items)].tolist():
        s = segments[i]
        rows = slice(s.first_row + row_offset, s.first_row + min(row_offset + row_tile, s.n_rows))
        keys = slice(s.base + kv_offset, s.base + min(kv_offset + kv_tile, s.length))
        seen[rows, keys] += 1
    want = np.zeros_like(seen)
    for s in segments:
        want[s.first_row : s.first_row + s.n_rows, s.base : s.base + s.length] = 1
    assert np.array_equal(seen, want)
