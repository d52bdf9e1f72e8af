"""What every implementation of ``split_kv_decode`` shows."""

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from kernel_suite import (
    HEAD_DIMS,
    HEAD_SHAPES,
    TOLERANCE,
    Suite,
    close,
    draw,
    essential,
    spoil,
    wide,
)
from merge_append_suites import scattered

import pallas_kernels
from pallas_kernels.implementation import ImplementationError
from pallas_kernels.split_kv_decode import longest_first

SPLIT_KV_DECODE = jax.jit(
    pallas_kernels.split_kv_decode,
    static_argnames=("page_size", "scale", "splits", "out_dtype", "implementation"),
)


class SplitKvDecodeSuite(Suite):
    """Each row attends to its own tokens, scattered over pages."""

    heads = (2, 2)  # K, G where a case does not say

    def cannot_run(self, *, dtype, heads, head_dim, page_size, splits) -> bool:
        """Whether the implementation refuses the case, by its name."""
        return False

    def per_head(self, *values):
        """One value for each KV head, the given ones in turn."""
        return tuple(np.resize(values, self.heads[0]).tolist())

    def check(
        self,
        ranges,
        *,
        heads=None,
        head_dim=64,
        dtype=None,
        page_size=1,
        inputs=None,
        unused=np.nan,
        head_lengths=None,
        splits=None,
        order=None,
        prefix_counts=None,
        out_dtype="float32",
    ):
        """``ranges``: (start, length) of the first rows of five; the others are empty.

        ``head_lengths``: of each row, for its KV heads in turn. ``prefix_counts``: likewise, how
        many partials over other keys there are to merge with.
        """
        heads = self.heads if heads is None else heads
        n_rows, n_slots, (n_kv_heads, group) = 5, 256, heads
        dtype = self.dtype if dtype is None else dtype
        ranges = [*ranges, *[(0, 0)] * (n_rows - len(ranges))]
        rng = np.random.default_rng(10)
        starts, lengths = np.array(ranges, np.int32).T.copy()
        ends = np.repeat(lengths[:, None], n_kv_heads, axis=1)
        if head_lengths is not None:
            ends = np.array([np.resize(row, n_kv_heads) for row in head_lengths], np.int32)
        pages = np.stack([rng.permutation(n_slots // page_size) for _ in range(n_rows)])
        longest = reference.paged_slots(pages, starts, ends.max(axis=1), page_size)
        if inputs is None:
            inputs = (
                draw(11, (n_rows, n_kv_heads * group, head_dim), dtype),
                draw(12, (n_slots, n_kv_heads, head_dim), dtype),
                draw(13, (n_slots, n_kv_heads, head_dim), dtype),
            )
        q, k, v = (x.astype(dtype) for x in inputs)
        k, v = (spoil(x, longest, unused) for x in (k, v))
        table = pages.copy()  # entries outside a row's range are nobody's and hold anything
        for row in range(n_rows):
            table[row, : starts[row] // page_size] = -5
            table[row, -(-int(ends[row].max()) // page_size) :] = 1 << 30
        args = [jnp.asarray(x, jnp.int32) for x in (table, starts, lengths)]
        prefix, *partials = None, [], []
        if prefix_counts is not None:
            prefix, *partials = scattered(
                [np.resize(row, n_kv_heads) for row in prefix_counts], group, head_dim
            )
        options = {
            "page_size": page_size,
            "scale": head_dim**-0.5,
            "splits": splits,
            "head_lengths": None if head_lengths is None else jnp.asarray(ends),
            "order": None if order is None else jnp.asarray(order, jnp.int32),
            "prefix": prefix,
            "out_dtype": out_dtype,
        }
        case = {"dtype": dtype, "heads": heads, "head_dim": head_dim, "page_size": page_size}
        if self.cannot_run(**case, splits=splits):
            with pytest.raises(ImplementationError, match=f"cannot run as {self.implementation}"):
                SPLIT_KV_DECODE(q, k, v, *args, implementation=self.implementation, **options)
            pytest.skip("refused by name, as it should be")
        actual = SPLIT_KV_DECODE(q, k, v, *args, implementation=self.implementation, **options)
        if self.implementation == "xla":
            heads = []
            for head in range(n_kv_heads):
                visible = reference.paged_slots(pages, starts, ends[:, head], page_size)
                own = slice(head * group, (head + 1) * group)
                keys, values = (wide(x)[:, head : head + 1] for x in (k, v))
                heads.append(
                    reference.attend_slots(wide(q)[:, own], keys, values, visible, head_dim**-0.5)
                )
            own = (np.concatenate(parts, axis=1) for parts in zip(*heads, strict=True))
            own, partials = ([x, *more] for x, more in zip(own, partials, strict=True))
            expected = reference.merge(own, partials)
        else:
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            options["out_dtype"] = "float32"
            expected = SPLIT_KV_DECODE(q, k, v, *args, implementation="xla", **options)
        worst = max(dtype, out_dtype, key=lambda name: TOLERANCE[jnp.dtype(name).name])
        close((actual[0].astype(jnp.float32), actual[1]), expected, worst)
        return actual

    @essential
    def test_rows_of_very_different_lengths(self):
        self.check([(0, 1), (0, 200), (0, 63), (0, 64), (0, 65)])

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
    def test_lengths_around_a_tile_edge(self, length):
        self.check([(0, length)])

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @essential
    def test_page_sizes(self, page_size):
        self.check([(0, 5), (0, 70), (0, 96)], page_size=page_size)

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_a_row_begins_at_its_start(self, page_size):
        self.check([(16, 19), (32, 130), (0, 20)], page_size=page_size)

    @essential
    def test_a_row_without_tokens_is_empty(self):
        out, lse = self.check([(0, 0), (0, 9), (16, 16), (48, 20)])
        empty = np.array([0, 2, 3])
        assert np.isneginf(lse[empty]).all()
        assert (np.asarray(out[empty]) == 0).all()

    def test_every_row_without_tokens_is_empty(self):
        out, lse = self.check([])
        assert np.isneginf(lse).all()
        assert (np.asarray(out) == 0).all()

    @essential
    def test_infinities_in_unused_slots_do_not_leak(self):
        self.check([(0, 33), (0, 3)], unused=np.inf)

    def test_large_logits_of_both_signs(self):
        (n_kv_heads, group), large = self.heads, 60.0
        pool = (256, n_kv_heads, 64)
        inputs = (
            draw(4, (5, n_kv_heads * group, 64), "float32", large),
            draw(5, pool, "float32", large),
            draw(6, pool, "float32"),
        )
        self.check([(0, 100), (0, 7)], inputs=inputs)

    def test_equal_keys_average_the_values(self):
        n_kv_heads, group = self.heads
        q = draw(7, (5, n_kv_heads * group, 64), self.dtype)
        k = jnp.ones((256, n_kv_heads, 64), jnp.float32)
        head = jnp.arange(n_kv_heads, dtype=jnp.float32)
        out, lse = self.check(
            [(0, 50)], inputs=(q, k, jnp.broadcast_to(head[None, :, None], k.shape))
        )
        np.testing.assert_allclose(out[0, :, 0], np.repeat(head, group), atol=1e-5)
        score = wide(q)[0].astype(np.float64).sum(axis=-1) / 8 + np.log(50)
        np.testing.assert_allclose(lse[0], score, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(("n_kv_heads", "group"), HEAD_SHAPES)
    def test_head_shapes(self, n_kv_heads, group):
        self.check([(0, 40), (0, 3)], heads=(n_kv_heads, group), dtype="bfloat16")

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_head_dims(self, head_dim):
        self.check([(0, 37), (0, 3)], head_dim=head_dim, dtype="bfloat16")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_dtypes(self, dtype):
        self.check([(0, 37), (0, 3)], dtype=dtype)

    def test_repeated_runs_are_bitwise_equal(self):
        first, second = self.check([(0, 70), (0, 3)]), self.check([(0, 70), (0, 3)])
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)

    @essential
    def test_heads_of_their_own_lengths(self):
        lengths = [[70, 3], [0, 17], [64, 64], [1, 0], [0, 0]]
        out, lse = self.check([(0, 70)] * 5, head_lengths=lengths)
        assert np.isneginf(lse[1, : self.heads[1]]).all()
        assert (np.asarray(out[1, : self.heads[1]]) == 0).all()

    @essential
    def test_a_split_table_changes_nothing(self):
        self.check([(0, 200), (0, 3), (16, 90)], splits=self.per_head(3, 1))

    @essential
    def test_heads_split_alike(self):
        self.check([(0, 200), (0, 3), (16, 90)], splits=self.per_head(3))

    def test_more_splits_than_tokens(self):
        self.check([(0, 1), (0, 2)], splits=self.per_head(4))

    @pytest.mark.parametrize("splits", [(1,), (2, 0), (1, 2, 3)])
    @essential
    def test_a_split_table_of_the_wrong_size_is_refused(self, splits):
        with pytest.raises(ValueError, match=f"{self.heads[0]} positive integers"):
            self.check([(0, 5)], splits=splits)

    @pytest.mark.parametrize("n_splits", [1, 3])
    @essential
    def test_prefix_partials_are_merged_in(self, n_splits):
        counts = [[1, 3], [12, 2], [0, 1], [1, 0], [0, 0]]
        ranges = [(0, 70), (0, 9), (16, 40), (0, 0), (0, 0)]
        out, lse = self.check(ranges, prefix_counts=counts, splits=self.per_head(n_splits))
        assert np.isneginf(lse).any(axis=1).tolist() == [False, False, False, True, True]
        assert np.isfinite(lse[3, : self.heads[1]]).all()
        assert (np.asarray(out[4]) == 0).all()

    def test_no_row_has_prefix_partials(self):
        self.check([(0, 70), (0, 9)], prefix_counts=[[0, 0]] * 5)

    @pytest.mark.parametrize(("n_kv_heads", "group"), HEAD_SHAPES)
    def test_prefix_partials_of_head_shapes(self, n_kv_heads, group):
        counts = np.random.default_rng(3).integers(0, 11, (5, n_kv_heads))
        self.check([(0, 40), (0, 3)], heads=(n_kv_heads, group), prefix_counts=counts)

    @pytest.mark.parametrize("n_splits", [1, 2])
    @essential
    def test_the_output_in_a_narrow_type_and_its_log_sum_exp_in_float32(self, n_splits):
        counts, splits = [[2, 1]] * 5, self.per_head(n_splits)
        out, lse = self.check(
            [(0, 70), (0, 9)], prefix_counts=counts, splits=splits, out_dtype="bfloat16"
        )
        assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)

    @essential
    def test_the_order_of_the_rows_changes_nothing(self):
        ranges = [(0, 5), (0, 70), (0, 0), (16, 40), (0, 1)]
        plain = self.check(ranges)
        ordered = self.check(ranges, order=[1, 3, 0, 4, 2])
        for a, b in zip(plain, ordered, strict=True):
            np.testing.assert_array_equal(a, b)


class LongestFirstSuite:
    """The order in which rows start: the same for every implementation."""

    def test_rows_come_by_falling_length(self):
        starts, lengths = jnp.array([0, 16, 0, 32]), jnp.array([5, 40, 24, 32])
        assert longest_first(starts, lengths).tolist() == [1, 2, 0, 3]

    def test_of_a_row_whose_heads_differ_the_longest_counts(self):
        lengths = jnp.array([[5, 9], [2, 11], [10, 1]])
        assert longest_first(jnp.zeros(3, jnp.int32), lengths).tolist() == [1, 2, 0]
