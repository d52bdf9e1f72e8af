"""Decode attention: every backend against a float64 reference over the same context."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax import AttentionPartial, ConfigError, Segment, decode_attention, make_plan, merge
from kvgrain_jax.attention.plan import Tiling
from tests.kernels.kernel_reference import attend_slots

N_SLOTS = 512
ATTEND = jax.jit(decode_attention, static_argnames=("backend", "page_size"))


class Scene:
    """Rows over one pool: an outer prefix of all rows, inner ones of some, and own suffixes."""

    def __init__(self, page_size, *, heads=6, kv_heads=2, head_dim=16, common=False, seed=0):
        rng = np.random.default_rng(seed)
        outer, inner_a, inner_b = (
            Segment(0, 96, 0, 5),
            Segment(128, 48, 0, 2),
            Segment(192, 80, 2, 2),
        )
        self.segments = [outer] if common else [outer, inner_a, inner_b]
        self.page_size = page_size
        suffixes = [1, 37, 16, 5, 30]
        free = rng.permutation(np.arange(288 // page_size, N_SLOTS // page_size))
        self.tables, self.lengths, self.visible = [], [], []
        for row, suffix in enumerate(suffixes):
            shared = [s for s in self.segments if s.first_row <= row < s.first_row + s.n_rows]
            slots = np.concatenate([np.arange(s.base, s.base + s.length) for s in shared])
            n_pages = -(-suffix // page_size)
            own, free = free[:n_pages], free[n_pages:]
            own_slots = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[:suffix]
            self.tables.append(np.concatenate([slots[::page_size] // page_size, own]))
            self.visible.append(np.concatenate([slots, own_slots]))
            self.lengths.append(slots.size + suffix)
        width = max(len(table) for table in self.tables) + 3
        self.pages = np.full((5, width), 0, np.int32)
        for row, table in enumerate(self.tables):
            self.pages[row, : len(table)] = table
        self.q = rng.standard_normal((5, heads, head_dim))
        self.k = rng.standard_normal((N_SLOTS, kv_heads, head_dim))
        self.v = rng.standard_normal((N_SLOTS, kv_heads, head_dim))

    def plan(self, **tilings):
        slots = self.pages.shape[1] * self.page_size
        return make_plan(
            self.segments, n_rows=5, n_slots=max(slots, N_SLOTS), max_segments=4, **tilings
        )

    def attend(self, backend, dtype=jnp.float32, **tilings):
        q, k, v = (jnp.asarray(x, dtype) for x in (self.q, self.k, self.v))
        return ATTEND(
            q,
            k,
            v,
            self.plan(**tilings),
            jnp.asarray(self.pages),
            jnp.asarray(self.lengths, jnp.int32),
            backend=backend,
            page_size=self.page_size,
        )

    @functools.cached_property
    def want(self):
        return attend_slots(self.q, self.k, self.v, self.visible, self.q.shape[-1] ** -0.5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("backend", ["dense", "cascade", "paged"])
def test_backends_agree_with_the_reference(backend, page_size):
    scene = Scene(page_size)
    got = scene.attend(backend)
    np.testing.assert_allclose(got.out, scene.want[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.lse, scene.want[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("page_size", [1, 16])
def test_cascade16_reads_what_all_rows_share_through_the_pages_of_row_0(page_size):
    scene = Scene(page_size, common=True)
    got = scene.attend("cascade16")
    np.testing.assert_allclose(got.out, scene.want[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.lse, scene.want[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("group", [1, 3, 5, 7])
def test_group_sizes_and_odd_head_dims(group):
    scene = Scene(1, heads=2 * group, kv_heads=2, head_dim=20)
    for backend in ("dense", "cascade", "paged"):
        np.testing.assert_allclose(scene.attend(backend).out, scene.want[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("tile", [(1, 1), (2, 33), (3, 96), (5, 97), (64, 512)])
def test_tile_sizes_do_not_change_the_result(tile):
    scene = Scene(1)
    got = scene.attend("dense", dense=Tiling(*tile))
    np.testing.assert_allclose(got.out, scene.want[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.lse, scene.want[1], rtol=2e-6, atol=2e-6)


def test_bfloat16_pools_accumulate_in_float32():
    scene = Scene(1)
    for backend in ("dense", "cascade", "paged"):
        got = scene.attend(backend, jnp.bfloat16)
        assert got.out.dtype == jnp.float32
        np.testing.assert_allclose(got.out, scene.want[0], rtol=0.05, atol=0.03)


def test_row_without_context_is_empty_whatever_the_unused_slots_hold():
    scene = Scene(1)
    scene.segments = []
    scene.lengths = [0, 0, 0, 0, 0]
    scene.k[:], scene.v[:] = np.nan, np.nan
    for backend in ("dense", "cascade", "paged"):
        got = scene.attend(backend)
        assert np.all(np.asarray(got.out) == 0)
        assert np.all(np.isneginf(got.lse))


def test_nan_in_slots_that_no_row_sees_does_not_leak():
    scene = Scene(4)
    unseen = np.setdiff1d(np.arange(N_SLOTS), np.concatenate(scene.visible))
    scene.k[unseen], scene.v[unseen] = np.nan, np.nan
    for backend in ("dense", "cascade", "paged"):
        np.testing.assert_allclose(scene.attend(backend).out, scene.want[0], rtol=2e-5, atol=2e-6)


def test_logits_too_large_for_exp_stay_finite():
    scene = Scene(1)
    scene.q *= 300
    for backend in ("dense", "cascade", "paged"):
        got = scene.attend(backend)
        np.testing.assert_allclose(got.out, scene.want[0], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(got.lse, scene.want[1], rtol=1e-5)


def test_unknown_backend_is_named():
    with pytest.raises(ConfigError, match="no backend 'flash'"):
        Scene(1).attend("flash")


def test_merge_of_empty_partials_is_empty():
    empty = AttentionPartial(jnp.zeros((2, 3, 4)), jnp.full((2, 3), -jnp.inf))
    got = merge([empty, empty])
    assert np.all(np.asarray(got.out) == 0)
    assert np.all(np.isneginf(got.lse))


def test_merge_with_an_empty_partial_changes_nothing():
    empty = AttentionPartial(jnp.zeros((1, 1, 2)), jnp.full((1, 1), -jnp.inf))
    full = AttentionPartial(jnp.asarray([[[1.0, -2.0]]]), jnp.asarray([[3.5]]))
    got = merge([empty, full, empty])
    np.testing.assert_array_equal(got.out, full.out)
    np.testing.assert_array_equal(got.lse, full.lse)


def test_merge_weighs_by_natural_exponentials():
    one = AttentionPartial(jnp.asarray([[[1.0]]]), jnp.log(jnp.asarray([[3.0]])))
    other = AttentionPartial(jnp.asarray([[[5.0]]]), jnp.log(jnp.asarray([[1.0]])))
    got = merge([one, other])
    np.testing.assert_allclose(got.out, [[[2.0]]], rtol=1e-6)
    np.testing.assert_allclose(got.lse, np.log([[4.0]]), rtol=1e-6)
