"""What every implementation of ``merge_partials`` and of ``append_kv`` shows."""

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from kernel_suite import HEAD_DIMS, Suite, close, draw, essential, wide

import pallas_kernels

MERGE_PARTIALS = jax.jit(pallas_kernels.merge_partials, static_argnames="implementation")
APPEND_KV = jax.jit(pallas_kernels.append_kv, static_argnames="implementation")


class MergeSuite(Suite):
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
