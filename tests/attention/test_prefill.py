"""Chunked prefill attention against a float64 causal reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax.attention import (
    ChunkPart,
    HotPiece,
    KernelShape,
    make_prefill_plan,
    prefill_attention,
)
from kvgrain_jax.attention.plan import Tiling
from tests.kernels.kernel_reference import attend_slots

N_SLOTS, ROW_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 96, 6, 2, 8


SMALL_TILES = Tiling(4, 16)


def check(parts, tables, size, page_size=1, tiling=SMALL_TILES, max_parts=3, **sizes):
    """Compare a chunk with the reference; ``tables``: slots of each row's context, in order."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((size, HEADS, HEAD_DIM))
    k, v = rng.standard_normal((2, N_SLOTS, KV_HEADS, HEAD_DIM))
    pages = np.zeros((3, ROW_TOKENS // page_size), np.int32)
    for row, slots in tables.items():
        row_pages = np.asarray(slots)[::page_size] // page_size
        pages[row, : len(row_pages)] = row_pages
    visible = [np.zeros(0, int)] * size
    token = 0
    for part in parts:
        for i in range(part.n_tokens):
            visible[token] = np.asarray(tables[part.row][: part.first + i + 1])
            token += 1
    # The chunk's own keys come with the call and are not in the pool yet.
    new_k, new_v = np.zeros((2, size, KV_HEADS, HEAD_DIM))
    pool_k, pool_v = k.copy(), v.copy()
    token = 0
    for part in parts:
        own = np.asarray(tables[part.row][part.first : part.first + part.n_tokens])
        span = slice(token, token + part.n_tokens)
        new_k[span], new_v[span] = k[own], v[own]
        pool_k[own], pool_v[own] = np.nan, np.nan
        token += part.n_tokens
    plan = make_prefill_plan(
        parts,
        n_tokens=size,
        n_rows=3,
        row_tokens=ROW_TOKENS,
        n_slots=N_SLOTS,
        max_parts=max_parts,
        tiling=tiling,
        **{"max_pieces": 2, **sizes},
    )
    attend = jax.jit(prefill_attention, static_argnames="page_size")
    got = attend(
        *(jnp.asarray(x, jnp.float32) for x in (q, new_k, new_v, pool_k, pool_v)),
        plan,
        jnp.asarray(pages),
        page_size=page_size,
    )
    out, lse = attend_slots(q, k, v, visible, HEAD_DIM**-0.5)
    np.testing.assert_allclose(got.out, out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.lse, lse, rtol=2e-6, atol=2e-6)


def scattered(n, seed=1):
    return np.random.default_rng(seed).permutation(np.arange(128, 256))[:n]


def test_first_chunk_of_a_prompt_in_cold():
    check([ChunkPart(0, 0, 20, ())], {0: scattered(40)}, 24)


def test_later_chunk_sees_the_earlier_tokens():
    check([ChunkPart(1, 20, 13, ())], {1: scattered(40)}, 16)


def test_chunk_behind_a_hot_prefix():
    slots = np.concatenate([np.arange(64, 100), scattered(30)])
    check([ChunkPart(0, 40, 10, (HotPiece(1, 64, 36),))], {0: slots}, 16)


def test_chunk_inside_the_slab_that_it_computes_sees_no_later_token():
    check([ChunkPart(0, 10, 12, (HotPiece(1, 32, 60),))], {0: np.arange(32, 92)}, 12)


def test_chunk_across_the_end_of_the_slab():
    slots = np.concatenate([np.arange(64, 94), scattered(20)])
    check([ChunkPart(0, 25, 15, (HotPiece(1, 64, 30),))], {0: slots}, 16)


def test_nested_hot_pieces():
    slots = np.concatenate([np.arange(0, 20), np.arange(64, 80), scattered(10)])
    check([ChunkPart(0, 30, 12, (HotPiece(1, 0, 20), HotPiece(2, 64, 16)))], {0: slots}, 16)


@pytest.mark.parametrize("tiling", [Tiling(1, 1), Tiling(5, 7), Tiling(64, 256)])
def test_several_requests_in_one_chunk_do_not_see_each_other(tiling):
    tables = {
        0: np.concatenate([np.arange(0, 33), scattered(20, seed=2)]),
        1: scattered(60)[30:],
        2: np.arange(64, 84),
    }
    parts = [
        ChunkPart(2, 0, 9, (HotPiece(1, 64, 20),)),
        ChunkPart(0, 33, 5, (HotPiece(2, 0, 33),)),
        ChunkPart(1, 3, 7, ()),
    ]
    check(parts, tables, 24, tiling=tiling)


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_several_tokens(page_size):
    ids = np.random.default_rng(3).permutation(np.arange(128 // page_size, 256 // page_size))
    slots = (ids[:, None] * page_size + np.arange(page_size)).reshape(-1)[:90]
    check([ChunkPart(1, 16, 22, ())], {1: slots}, 32, page_size=page_size)


def test_requests_behind_one_prefix_share_its_segment():
    hot = (HotPiece(1, 0, 33),)
    tables = {
        row: np.concatenate([np.arange(0, 33), scattered(30)[10 * row : 10 * row + 10]])
        for row in range(3)
    }
    parts = [ChunkPart(row, 33, 5 + row, hot) for row in range(3)]
    plan = make_prefill_plan(
        parts, n_tokens=24, n_rows=3, row_tokens=96, n_slots=256, max_parts=3, max_pieces=2
    )
    assert plan.hot.segments[:2].tolist() == [[0, 33, 0, 18], [0, 0, 0, 0]]
    check(parts, tables, 24)


@pytest.mark.parametrize(("depth", "contiguous"), [(1, 64), (3, 192), (5, 192)])
def test_a_full_chunk_reads_three_nested_levels_as_contiguous_ones(depth, contiguous):
    pieces = tuple(HotPiece(i, 64 * i, 64) for i in range(0, 2 * depth, 2))
    parts = [ChunkPart(row, 64 * depth, 512, pieces) for row in range(8)]
    plan = make_prefill_plan(
        parts,
        n_tokens=4096,
        n_rows=8,
        row_tokens=2048,
        n_slots=1024,
        max_parts=8,
        max_pieces=8,
        kernels=KernelShape(n_kv_heads=8, group=4, head_dim=128, n_workers=132),
    )
    assert plan.hot.segments[:, 1].sum() == contiguous
    assert plan.cold.segments[0, 1] == 64 * depth - contiguous


def test_pieces_that_the_plan_does_not_hold_are_read_through_the_pages():
    lengths = [8, 7, 6, 5]
    hot = tuple(HotPiece(i, 32 * i, length) for i, length in enumerate(lengths))
    slots = [np.arange(32 * i, 32 * i + length) for i, length in enumerate(lengths)]
    tables = {0: np.concatenate([*slots, scattered(10)])}
    part = ChunkPart(0, 26, 10, hot)
    plan = make_prefill_plan(
        [part], n_tokens=16, n_rows=3, row_tokens=96, n_slots=256, max_parts=1, max_pieces=1
    )
    assert plan.hot.segments.tolist() == [[0, 8, 0, 10], [32, 7, 0, 10]]
    assert plan.cold.segments.tolist() == [[15, 11, 0, 10]]
    check([part], tables, 16, max_parts=1, max_pieces=1)


@pytest.mark.parametrize("room", [1, 33, 36, 96])
def test_earlier_tokens_in_pages_are_staged_as_far_as_there_is_room(room):
    slots = scattered(80)
    tables = {0: np.concatenate([np.arange(0, 33), slots[:20]]), 1: slots[20:60], 2: slots[60:]}
    parts = [
        ChunkPart(1, 33, 7, ()),
        ChunkPart(0, 36, 5, (HotPiece(2, 0, 33),)),
        ChunkPart(2, 0, 9, ()),
    ]
    check(parts, tables, 24, max_staged=room)


def test_staged_pages_of_several_tokens():
    ids = np.random.default_rng(3).permutation(np.arange(32, 64))
    slots = (ids[:, None] * 4 + np.arange(4)).reshape(-1)[:90]
    check([ChunkPart(1, 18, 22, ())], {1: slots}, 32, page_size=4, max_staged=64)


def test_staged_tokens_lie_in_front_of_their_requests_own():
    parts = [ChunkPart(2, 5, 3, ()), ChunkPart(0, 40, 4, ()), ChunkPart(1, 2, 1, ())]
    plan = make_prefill_plan(
        parts,
        n_tokens=16,
        n_rows=3,
        row_tokens=96,
        n_slots=256,
        max_parts=3,
        max_pieces=1,
        max_staged=32,
    )
    assert plan.own.segments.tolist() == [[0, 8, 0, 3], [8, 4, 3, 4], [16, 3, 7, 1]]
    assert plan.cold.segments.tolist() == [[0, 40, 3, 4], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert plan.first.tolist() == [-5, 3, 5]
    assert plan.n_staged == 24
    assert plan.staged is not None
    assert plan.staged[:8].tolist() == [192, 193, 194, 195, 196, 288, 289, 290]
    assert plan.staged[16:19].tolist() == [96, 97, 295]
