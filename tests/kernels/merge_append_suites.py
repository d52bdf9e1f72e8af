"""What every implementation of the merges, of ``append_kv``, ``stage_kv`` and their like shows."""

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from kernel_suite import HEAD_DIMS, Suite, close, draw, essential, wide

import pallas_kernels
from pallas_kernels.merge import merge_row_partials
from pallas_kernels.row_partials import RowPartials

MERGE_PARTIALS = jax.jit(pallas_kernels.merge_partials, static_argnames="implementation")
MERGE_ROW_PARTIALS = jax.jit(
    merge_row_partials, static_argnames=("n_heads", "out_dtype", "implementation")
)
APPEND_KV = jax.jit(pallas_kernels.append_kv, static_argnames="implementation")


def scattered(counts, group, head_dim, seed=0):
    """Random partials, ``counts[b][k]`` of them, strewn over arrays that hold NaN elsewhere.

    Returns them as ``RowPartials``, and as ``[S, B, H, D]`` and ``[S, B, H]``, empty in the gaps.
    """
    rng = np.random.default_rng(seed)
    counts = np.array(counts, np.int32)
    (n_rows, n_kv_heads), most = counts.shape, max(1, int(counts.max()))
    n_places = 2 * int(counts.sum()) + 1
    free = iter(rng.permutation(n_places) * group)
    outs = np.full((n_places * group, head_dim), np.nan, np.float32)
    lses = np.full(n_places * group, np.nan, np.float32)
    places = np.full((n_rows, n_kv_heads, most), -1, np.int32)
    dense = np.zeros((most, n_rows, n_kv_heads, group, head_dim), np.float32)
    dense_lses = np.full(dense.shape[:-1], -np.inf, np.float32)
    for row, head in np.ndindex(counts.shape):
        for s in range(counts[row, head]):
            places[row, head, s] = place = next(free)
            own = slice(place, place + group)
            outs[own] = dense[s, row, head] = rng.standard_normal((group, head_dim))
            lses[own] = dense_lses[s, row, head] = rng.standard_normal(group) * 3
    shape = (most, n_rows, n_kv_heads * group)
    part = RowPartials(*(jnp.asarray(x) for x in (outs, lses, places, counts)))
    return part, dense.reshape(*shape, head_dim), dense_lses.reshape(shape)


class RowMergeSuite(Suite):
    """The partials that each row has, wherever they lie, become the row's result."""

    def check_rows(self, *counts, group=2, head_dim=64, out_dtype="float32"):
        """``counts``: of each source the partials of every row and KV head."""
        made = [scattered(c, group, head_dim, seed) for seed, c in enumerate(counts)]
        actual = MERGE_ROW_PARTIALS(
            [part for part, _, _ in made],
            n_heads=len(counts[0][0]) * group,
            out_dtype=out_dtype,
            implementation=self.implementation,
        )
        outs, lses = (np.concatenate(parts) for parts in list(zip(*made, strict=True))[1:])
        close((actual[0].astype(jnp.float32), actual[1]), reference.merge(outs, lses), out_dtype)
        return actual

    @essential
    def test_rows_of_their_own_numbers_of_partials(self):
        out, lse = self.check_rows([[1, 0], [3, 20], [0, 0]])
        assert (np.asarray(out[2]) == 0).all()
        assert np.isneginf(lse[2]).all()

    @essential
    def test_partials_of_two_sources(self):
        self.check_rows([[1, 0], [0, 2]], [[0, 3], [0, 1]])

    @essential
    def test_more_partials_than_are_read_at_once(self):
        self.check_rows([[70, 3], [0, 130]], [[1, 2], [0, 3]], group=3, head_dim=32)

    def test_no_row_has_partials(self):
        out, lse = self.check_rows([[0, 0], [0, 0]])
        assert (np.asarray(out) == 0).all()
        assert np.isneginf(lse).all()

    @pytest.mark.parametrize("group", [1, 3, 5, 16])
    def test_groups(self, group):
        self.check_rows([[2, 9], [1, 4]], group=group)

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_head_dims_of_row_partials(self, head_dim):
        self.check_rows([[2], [1]], head_dim=head_dim)

    @essential
    def test_the_output_in_a_narrow_type_and_its_log_sum_exp_in_float32(self):
        out, lse = self.check_rows([[2, 1], [1, 4]], out_dtype="bfloat16")
        assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


class MergeSuite(RowMergeSuite):
    """Partial results over disjoint keys become the result over their union."""

    def check(self, outs, lses):
        actual = MERGE_PARTIALS(outs, lses, implementation=self.implementation)
        close(actual, reference.merge(outs, lses), "float32")
        return actual

    @pytest.mark.parametrize("n_partials", [1, 2, 3, 9])
    def test_any_number_of_partials(self, n_partials):
        self.check(
            draw(14, (n_partials, 3, 6, 64), "float32"),
            draw(15, (n_partials, 3, 6), "float32", 3.0),
        )

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_head_dims(self, head_dim):
        self.check(draw(14, (2, 3, 5, head_dim), "float32"), draw(15, (2, 3, 5), "float32", 3.0))

    def test_partials_of_a_split_merge_to_the_whole(self):
        q, k, v = (draw(i, (40, 64), "float32") for i in (16, 17, 18))
        cuts = [(0, 1), (1, 30), (30, 30), (30, 40)]
        parts = [reference.attend(q[0], k[a:b], v[a:b], 0.125) for a, b in cuts]
        outs = jnp.asarray(np.array([p[0] for p in parts], np.float32)[:, None, None])
        lses = jnp.asarray(np.array([p[1] for p in parts], np.float32)[:, None, None])
        out, lse = self.check(outs, lses)
        whole_out, whole_lse = reference.attend(q[0], k, v, 0.125)
        np.testing.assert_allclose(out[0, 0], whole_out, atol=1e-5)
        np.testing.assert_allclose(lse[0, 0], whole_lse, rtol=1e-5)

    def test_all_partials_empty_give_the_empty_result(self):
        out, lse = self.check(jnp.zeros((3, 2, 4, 64)), jnp.full((3, 2, 4), -jnp.inf))
        assert (np.asarray(out) == 0).all()
        assert np.isneginf(lse).all()

    def test_an_empty_partial_changes_nothing(self):
        outs = draw(19, (2, 2, 4, 64), "float32").at[1].set(0)
        lses = draw(20, (2, 2, 4), "float32").at[1].set(-jnp.inf)
        out, lse = self.check(outs, lses)
        np.testing.assert_array_equal(out, outs[0])
        np.testing.assert_allclose(lse, lses[0], rtol=1e-6)

    def test_far_apart_log_sum_exps_do_not_overflow(self):
        outs = draw(21, (2, 1, 2, 64), "float32")
        lses = jnp.asarray([[[9e4, -9e4]], [[-9e4, 9e4]]], jnp.float32)
        out, _ = self.check(outs, lses)
        np.testing.assert_array_equal(out[0, 0], outs[0, 0, 0])
        np.testing.assert_array_equal(out[0, 1], outs[1, 0, 1])

    def test_log_sum_exps_are_natural(self):
        _, lse = self.check(jnp.zeros((2, 1, 1, 64)), jnp.log(jnp.asarray([[[3.0]], [[5.0]]])))
        np.testing.assert_allclose(lse, [[np.log(8.0)]], rtol=1e-6)


class AppendSuite(Suite):
    """New keys and values go to their slots and nowhere else."""

    def check(self, slots, *, n_slots=50, heads=2, head_dim=64, dtype="bfloat16", new="bfloat16"):
        shape, new_shape = (n_slots, heads, head_dim), (len(slots), heads, head_dim)
        k, v = draw(22, shape, dtype), draw(23, shape, dtype)
        new_k, new_v = draw(24, new_shape, new), draw(25, new_shape, new)
        expected = []
        for pool, rows in ((k, new_k), (v, new_v)):
            pool = wide(pool).copy()
            for slot, row in zip(slots, wide(rows.astype(dtype)), strict=True):
                if slot < n_slots:
                    pool[slot] = row
            expected.append(pool)
        slots = jnp.asarray(slots, jnp.int32)
        actual = APPEND_KV(k, v, new_k, new_v, slots, implementation=self.implementation)
        for got, want in zip(actual, expected, strict=True):
            assert got.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(wide(got), want)

    @essential
    def test_rows_go_to_their_slots_and_the_rest_stays(self):
        self.check([7, 0, 49, 23])

    @essential
    def test_a_slot_past_the_pool_drops_the_row(self):
        self.check([50, 3, 2**31 - 1, 51])

    def test_every_row_dropped_leaves_the_pool(self):
        self.check([50, 99])

    def test_one_row(self):
        self.check([31])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @essential
    def test_new_values_are_cast_to_the_pool(self, dtype):
        self.check([4, 9, 2], dtype=dtype, new="float32")

    @pytest.mark.parametrize(
        ("heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (5, 112), (32, 96)]
    )
    def test_head_shapes(self, heads, head_dim):
        self.check([4, 9, 2], heads=heads, head_dim=head_dim)


STAGE_KV = jax.jit(pallas_kernels.stage_kv, static_argnames="implementation")


class StageSuite(Suite):
    """Tokens of the pool and new ones lie side by side, in the order asked for."""

    def check(self, slots, n=None, *, n_slots=50, n_new=6, heads=2, head_dim=64, dtype="bfloat16"):
        k, v = (draw(i, (n_slots, heads, head_dim), dtype) for i in (26, 27))
        new_k, new_v = (draw(i, (n_new, heads, head_dim), dtype) for i in (28, 29))
        n = len(slots) if n is None else n
        actual = STAGE_KV(
            *(k, v, new_k, new_v, jnp.asarray(slots, jnp.int32), jnp.int32(n)),
            implementation=self.implementation,
        )
        for got, pool, rows in zip(actual, (k, v), (new_k, new_v), strict=True):
            assert got.dtype == jnp.dtype(dtype)
            want = np.concatenate([wide(pool), wide(rows)])[np.asarray(slots)[:n]]
            np.testing.assert_array_equal(wide(got)[:n], want)

    @essential
    def test_tokens_of_the_pool_and_new_ones_in_any_order(self):
        self.check([7, 50, 0, 49, 55, 23, 7, 51, 52, 3, 4])

    @essential
    def test_what_lies_behind_the_tokens_that_count_is_not_read(self):
        self.check([4, 53, 2**31 - 1, 2**31 - 1], 2)

    def test_no_token_counts(self):
        self.check([0, 0, 0], 0)

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_dtypes_of_the_pool(self, dtype):
        self.check([4, 52, 2], dtype=dtype)

    @pytest.mark.parametrize(
        ("heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (5, 112), (32, 96)]
    )
    def test_shapes_of_heads(self, heads, head_dim):
        self.check([4, 53, 9], heads=heads, head_dim=head_dim)


ROPE_APPEND = jax.jit(pallas_kernels.rope_append, static_argnames=("eps", "implementation"))


class RopeAppendSuite(Suite):
    """Queries and keys are turned by their angles, keys and values go to their slots."""

    def check(self, slots, *, shape=(2, 3), head_dim=64, dtype="bfloat16", n_slots=40, eps=0.0):
        (n_kv_heads, group), n_rows = shape, len(slots)
        norms = tuple(draw(seed, (head_dim,), dtype) for seed in (35, 36)) if eps else None
        k, v = (draw(seed, (n_slots, n_kv_heads, head_dim), dtype) for seed in (31, 32))
        qkv = draw(33, (n_rows, n_kv_heads, group + 2, head_dim), dtype)
        angles = np.random.default_rng(34).uniform(-4, 4, (n_rows, head_dim // 2))
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        got_k, got_v, q = ROPE_APPEND(
            k,
            v,
            qkv,
            cos,
            sin,
            jnp.asarray(slots, jnp.int32),
            norms,
            eps=eps,
            implementation=self.implementation,
        )
        # A pair of features is a complex number, its rotation a product.
        pairs = wide(qkv).astype(np.float64)
        if norms is not None:
            gains = np.stack([wide(norms[0])] * group + [wide(norms[1])] * 2)
            mean_square = np.mean(pairs**2, axis=-1, keepdims=True)
            pairs = pairs / np.sqrt(mean_square + eps) * gains
            pairs = wide(jnp.asarray(pairs, dtype)).astype(np.float64)
        pairs = pairs[..., : head_dim // 2] + 1j * pairs[..., head_dim // 2 :]
        turned = pairs * np.exp(1j * angles)[:, None, None, :]
        turned = np.concatenate([turned.real, turned.imag], axis=-1)
        want_k, want_v = wide(k).astype(np.float64), wide(v).copy()
        for row, slot in enumerate(slots):
            if slot < n_slots:
                want_k[slot], want_v[slot] = turned[row, :, group], wide(qkv)[row, :, group + 1]
        step = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}[dtype]
        assert (got_k.dtype, got_v.dtype, q.dtype) == (jnp.dtype(dtype),) * 3
        want_q = turned[:, :, :group].reshape(n_rows, -1, head_dim)
        if norms is not None:
            step *= 4  # the norm may be rounded to the other side, and gains make values larger
        np.testing.assert_allclose(wide(q), want_q, rtol=step, atol=step)
        np.testing.assert_allclose(wide(got_k), want_k, rtol=step, atol=step)
        np.testing.assert_array_equal(wide(got_v), want_v)

    @essential
    def test_rows_go_to_their_slots_and_the_rest_stays(self):
        self.check([7, 0, 39, 23])

    @essential
    def test_a_slot_past_the_pool_drops_the_row_but_not_its_queries(self):
        self.check([40, 3, 2**31 - 1])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_dtypes(self, dtype):
        self.check([4, 9, 2], dtype=dtype)

    @pytest.mark.parametrize("shape", [(1, 1), (8, 4), (3, 5), (1, 16)])
    def test_head_shapes(self, shape):
        self.check([4, 9, 2], shape=shape)

    @pytest.mark.parametrize("head_dim", [80, 96, 112, 128, 256])
    def test_head_dims(self, head_dim):
        self.check([5], head_dim=head_dim)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @essential
    def test_queries_and_keys_are_normed_first(self, dtype):
        self.check([4, 40, 2], dtype=dtype, eps=1e-5)

    @essential
    def test_norm_of_a_head_dim_that_is_no_power_of_two(self):
        self.check([5], head_dim=80, eps=0.5)


ADD_RMS_NORM = jax.jit(pallas_kernels.add_rms_norm, static_argnames=("eps", "implementation"))


class AddRmsNormSuite(Suite):
    """The sum of stream and branch, and its norm."""

    def check(self, rows, size, dtype="bfloat16", scale=1.0, eps=1e-5):
        x, delta = (draw(seed, (rows, size), dtype, scale) for seed in (41, 42))
        weight = draw(43, (size,), dtype)
        y, norm = ADD_RMS_NORM(x, delta, weight, eps=eps, implementation=self.implementation)
        want = wide(x + delta).astype(np.float64)
        step = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2e-6}[dtype]
        assert y.dtype == norm.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(wide(y), want)
        mean_square = np.mean(want**2, axis=-1, keepdims=True)
        want = want / np.sqrt(mean_square + eps) * wide(weight)
        np.testing.assert_allclose(wide(norm), want, rtol=2 * step, atol=step)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_dtypes(self, dtype):
        self.check(3, 64, dtype)

    @pytest.mark.parametrize("size", [16, 576, 1000, 5120])
    def test_sizes(self, size):
        self.check(2, size)

    def test_one_row(self):
        self.check(1, 128)

    def test_small_values_are_held_up_by_eps(self):
        self.check(2, 64, "float32", scale=1e-3, eps=1e-2)
