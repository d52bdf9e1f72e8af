"""Chunked prefill attention against a float64 causal reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax.attention import ChunkPart, make_prefill_plan, prefill_attention
from kvgrain_jax.attention.plan import Tiling
from tests.kernels.kernel_reference import attend_slots

N_SLOTS, ROW_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 96, 6, 2, 8


SMALL_TILES = Tiling(4, 16)


def check(parts, tables, size, page_size=1, tiling=SMALL_TILES):
    """Compare a chunk with the reference; ``tables``: slots of each row's context, in order."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((size, HEADS, HEAD_DIM))
    k, v = rng.standard_normal((2, N_SLOTS, KV_HEADS, HEAD_DIM))
    pages = np.zeros((3, ROW_TOKENS // page_size), np.int32)
    for row, slots in tables.items():
        row_pages = np.asarray(slots)[::page_size] // page_size
        pages[row, : len(row_pages)] = row_pages
    positions = np.full(size, -1, np.int32)
    visible = [np.zeros(0, int)] * size
    token = 0
    for part in parts:
        for i in range(part.n_tokens):
            positions[token] = part.first + i
            visible[token] = np.asarray(tables[part.row][: part.first + i + 1])
            token += 1
    plan = make_prefill_plan(
        parts,
        n_tokens=size,
        row_tokens=ROW_TOKENS,
        n_slots=N_SLOTS,
        max_parts=3,
        max_pieces=2,
        tiling=tiling,
    )
    attend = jax.jit(prefill_attention, static_argnames="page_size")
    got = attend(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        plan,
        jnp.asarray(pages),
        jnp.asarray(positions),
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
    check([ChunkPart(0, 40, 10, ((64, 36),))], {0: slots}, 16)


def test_chunk_inside_the_slab_that_it_computes_sees_no_later_token():
    check([ChunkPart(0, 10, 12, ((32, 60),))], {0: np.arange(32, 92)}, 12)


def test_chunk_across_the_end_of_the_slab():
    slots = np.concatenate([np.arange(64, 94), scattered(20)])
    check([ChunkPart(0, 25, 15, ((64, 30),))], {0: slots}, 16)


def test_nested_hot_pieces():
    slots = np.concatenate([np.arange(0, 20), np.arange(64, 80), scattered(10)])
    check([ChunkPart(0, 30, 12, ((0, 20), (64, 16)))], {0: slots}, 16)


@pytest.mark.parametrize("tiling", [Tiling(1, 1), Tiling(5, 7), Tiling(64, 256)])
def test_several_requests_in_one_chunk_do_not_see_each_other(tiling):
    tables = {
        0: np.concatenate([np.arange(0, 33), scattered(20, seed=2)]),
        1: scattered(60)[30:],
        2: np.arange(64, 84),
    }
    parts = [
        ChunkPart(2, 0, 9, ((64, 20),)),
        ChunkPart(0, 33, 5, ((0, 33),)),
        ChunkPart(1, 3, 7, ()),
    ]
    check(parts, tables, 24, tiling=tiling)


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_several_tokens(page_size):
    ids = np.random.default_rng(3).permutation(np.arange(128 // page_size, 256 // page_size))
    slots = (ids[:, None] * page_size + np.arange(page_size)).reshape(-1)[:90]
    check([ChunkPart(1, 16, 22, ())], {1: slots}, 32, page_size=page_size)
