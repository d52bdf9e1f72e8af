"""What every implementation of ``split_kv_decode`` shows."""

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from kernel_suite import HEAD_DIMS, HEAD_SHAPES, Suite, close, draw, essential, spoil, wide

import pallas_kernels

SPLIT_KV_DECODE = jax.jit(
    pallas_kernels.split_kv_decode,
    static_argnames=("page_size", "scale", "splits", "implementation"),
)


class SplitKvDecodeSuite(Suite):
    """Each row attends to its own tokens, scattered over pages."""

    def check(
        self,
        ranges,
        *,
        heads=(2, 2),
        head_dim=64,
        dtype=None,
        page_size=1,
        inputs=None,
        unused=np.nan,
        head_lengths=None,
        splits=None,
    ):
        """``ranges``: (start, length) of the first rows of five; the others are empty."""
        n_rows, n_slots, (n_kv_heads, group) = 5, 256, heads
        dtype = self.dtype if dtype is None else dtype
        ranges = [*ranges, *[(0, 0)] * (n_rows - len(ranges))]
        rng = np.random.default_rng(10)
        starts, lengths = np.array(ranges, np.int32).T.copy()
        ends = np.repeat(lengths[:, None], n_kv_heads, axis=1)
        if head_lengths is not None:
            ends = np.array(head_lengths, np.int32)
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
        options = {
            "page_size": page_size,
            "scale": head_dim**-0.5,
            "splits": splits,
            "head_lengths": None if head_lengths is None else jnp.asarray(ends),
        }
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
            expected = tuple(np.concatenate(parts, axis=1) for parts in zip(*heads, strict=True))
        else:
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            expected = SPLIT_KV_DECODE(q, k, v, *args, implementation="xla", **options)
        close(actual, expected, dtype)
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
        inputs = (draw(4, (5, 4, 64), "float32", 60.0), draw(5, (256, 2, 64), "float32", 60.0))
        self.check([(0, 100), (0, 7)], inputs=(*inputs, draw(6, (256, 2, 64), "float32")))

    def test_equal_keys_average_the_values(self):
        q, k = draw(7, (5, 4, 64), self.dtype), jnp.ones((256, 2, 64), jnp.float32)
        v = jnp.broadcast_to(jnp.arange(2, dtype=jnp.float32)[None, :, None], (256, 2, 64))
        out, lse = self.check([(0, 50)], inputs=(q, k, v))
        np.testing.assert_allclose(out[0, :, 0], [0, 0, 1, 1], atol=1e-5)
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
        assert np.isneginf(lse[1, :2]).all()
        assert (np.asarray(out[1, :2]) == 0).all()

    @essential
    def test_a_split_table_changes_nothing(self):
        self.check([(0, 200), (0, 3), (16, 90)], splits=(3, 1))

    def test_more_splits_than_tokens(self):
        self.check([(0, 1), (0, 2)], splits=(4, 4))

    @pytest.mark.parametrize("splits", [(1,), (2, 0), (1, 2, 3)])
    @essential
    def test_a_split_table_of_the_wrong_size_is_refused(self, splits):
        with pytest.raises(ValueError, match="2 positive integers"):
            self.check([(0, 5)], splits=splits)
