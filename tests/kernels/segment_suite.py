"""What every implementation of ``segment_attention`` shows."""

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

import pallas_kernels
from pallas_kernels.segment_attention import build_schedule

STATIC = ("row_tile", "kv_tile", "scale", "implementation")
SEGMENT_ATTENTION = jax.jit(pallas_kernels.segment_attention, static_argnames=STATIC)
SEGMENT_PARTIALS = jax.jit(pallas_kernels.segment_partials, static_argnames=STATIC)

NOTHING = (np.zeros(0), np.zeros(0))  # what a case that is refused gives


def tiles(segments, row_tile, kv_tile):
    """The work list of ``segment_attention``, padded with entries that do not count."""
    work = [
        (index, row, kv)
        for index, (_, length, _, rows) in enumerate(segments)
        for row in range(0, rows, row_tile)
        for kv in range(0, length, kv_tile)
    ]
    padded = np.full((32, 3), 9999, np.int32)
    padded[: len(work)] = np.array(work, np.int32).reshape(-1, 3)
    return jnp.asarray(padded), jnp.int32(len(work))


def merged(partials, n_heads):
    """The rows that partials make up, by ``reference.merge``: ``[B, H, D]`` and ``[B, H]``."""
    outs, lses = np.asarray(partials.outs), np.asarray(partials.lses)
    n_rows, n_kv_heads, _ = partials.places.shape
    group = n_heads // n_kv_heads
    out, lse = np.zeros((n_rows, n_heads, outs.shape[-1])), np.full((n_rows, n_heads), -np.inf)
    for row, head in np.ndindex(n_rows, n_kv_heads):
        places, count = partials.places[row, head], partials.counts[row, head]
        assert (places[count:] == -1).all()
        own = np.asarray(places[:count])[:, None] + np.arange(group)
        members = slice(head * group, head * group + group)
        out[row, members], lse[row, members] = reference.merge(outs[own], lses[own])
    return jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)


def positions(segments, diagonals, n_rows):
    """``(row_positions, first_positions)`` that say what ``diagonals`` do: a slot is a position."""
    of_row = np.zeros(n_rows, int)
    for (_, _, first_row, rows), diagonal in zip(segments, diagonals, strict=True):
        of_row[first_row : first_row + rows] = diagonal + np.arange(rows)
    return of_row, [base for base, *_ in segments] + [0] * (5 - len(segments))


class SegmentAttentionSuite(Suite):
    """Every row attends to the union of the segments that cover it."""

    schedule_tiles = (64, 64)  # folded rows and keys

    def check(
        self,
        segments,
        *,
        n_rows=8,
        n_slots=200,
        heads=(2, 2),
        head_dim=64,
        dtype=None,
        inputs=None,
        unused=np.nan,
        slots=None,
        row_positions=None,
        first_positions=None,
        diagonals=None,
        partials=False,
    ):
        """Compare one call with the reference; slots that no row may see hold ``unused``.

        ``diagonals`` give the positions and a causal schedule; ``partials`` calls the form that
        leaves the merge to others.
        """
        n_kv_heads, group = heads
        causal_by_positions = row_positions is not None
        if diagonals is not None:
            row_positions, first_positions = positions(segments, diagonals, n_rows)
            diagonals = np.array([*diagonals, *[0] * (5 - len(segments))])
        dtype = self.dtype if dtype is None else dtype
        if inputs is None:
            inputs = (
                draw(1, (n_rows, n_kv_heads * group, head_dim), dtype),
                draw(2, (n_slots, n_kv_heads, head_dim), dtype),
                draw(3, (n_slots, n_kv_heads, head_dim), dtype),
            )
        q, k, v = (x.astype(dtype) for x in inputs)
        visible = reference.segment_slots(n_rows, segments, slots, row_positions, first_positions)
        k, v = (spoil(x, visible, unused) for x in (k, v))
        work, n_work = tiles(segments, 16, 32)
        table = np.zeros((5, 4), np.int32)
        table[: len(segments)] = segments
        row_tile, kv_tile = self.schedule_tiles
        kv_tile = min(kv_tile, 64) if head_dim > 128 else kv_tile
        schedule = build_schedule(
            table,
            n_rows=n_rows,
            n_slots=n_slots,
            n_kv_heads=n_kv_heads,
            group=group,
            row_tile=row_tile,
            kv_tile=kv_tile,
            n_workers=3,
            diagonals=diagonals,
        )
        arrays = (
            None if x is None else jnp.asarray(x, jnp.int32)
            for x in (slots, row_positions, first_positions)
        )
        names = ("slots", "row_positions", "first_positions")
        options = {
            "row_tile": 16,
            "kv_tile": 32,
            "scale": head_dim**-0.5,
            **dict(zip(names, arrays, strict=True)),
        }
        args = (jnp.asarray(table), work, n_work)

        def run():
            call = SEGMENT_PARTIALS if partials else SEGMENT_ATTENTION
            result = call(
                q, k, v, *args, implementation=self.implementation, schedule=schedule, **options
            )
            return merged(result, n_kv_heads * group) if partials else result

        if self.refuses(
            dtype=dtype, slots=slots, row_positions=row_positions if causal_by_positions else None
        ):
            with pytest.raises(pallas_kernels.ImplementationError, match=self.implementation):
                run()
            return NOTHING
        actual = run()
        if self.implementation == "xla":
            expected = reference.attend_slots(wide(q), wide(k), wide(v), visible, head_dim**-0.5)
        else:
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            expected = SEGMENT_ATTENTION(q, k, v, *args, implementation="xla", **options)
        close(actual, expected, dtype)
        return actual

    def test_rows_of_two_classes_read_their_own_segment(self):
        self.check([(0, 70, 0, 5), (96, 41, 5, 3)])

    @pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65])
    def test_lengths_around_a_tile_edge(self, length):
        self.check([(64, length, 0, 3)])

    @pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33])
    def test_row_counts_around_a_tile_edge(self, rows):
        self.check([(32, 40, 0, rows)], n_rows=33)

    def test_one_row_and_one_token(self):
        out, lse = self.check([(7, 1, 0, 1)], n_rows=1, heads=(1, 1))
        assert np.isfinite(lse).all()
        assert np.abs(out).max() > 0

    @essential
    def test_nested_segments_add_up(self):
        self.check([(0, 50, 0, 6), (64, 20, 0, 4), (96, 33, 4, 2), (160, 9, 1, 1)])

    def test_a_row_in_no_segment_is_empty(self):
        out, lse = self.check([(0, 40, 1, 2)])
        assert np.isneginf(lse[0]).all()
        assert np.isneginf(lse[3:]).all()
        assert (np.asarray(out[3:]) == 0).all()

    def test_an_empty_segment_and_a_segment_without_rows_add_nothing(self):
        self.check([(0, 0, 0, 3), (32, 20, 0, 0), (64, 20, 3, 2)])

    @essential
    def test_rows_that_start_anywhere(self):
        self.check([(0, 40, 1, 2), (64, 33, 3, 5), (104, 70, 8, 25)], n_rows=33, heads=(1, 3))

    def test_no_work_gives_the_empty_result_everywhere(self):
        out, lse = self.check([(0, 0, 0, 4)])
        assert (np.asarray(out) == 0).all()
        assert np.isneginf(lse).all()

    def test_a_segment_at_the_end_of_the_pool(self):
        self.check([(192, 8, 0, 4)])

    def test_infinities_in_unused_slots_do_not_leak(self):
        self.check([(32, 33, 0, 4)], unused=np.inf)

    def test_large_logits_of_both_signs(self):
        inputs = (draw(4, (8, 4, 64), "float32", 60.0), draw(5, (200, 2, 64), "float32", 60.0))
        self.check([(0, 100, 0, 4)], inputs=(*inputs, draw(6, (200, 2, 64), "float32")))

    def test_equal_keys_average_the_values(self):
        q, v = draw(7, (8, 4, 64), self.dtype), draw(8, (200, 2, 64), self.dtype)
        k = jnp.ones((200, 2, 64), self.dtype)
        out, lse = self.check([(64, 50, 0, 8)], inputs=(q, k, v))
        mean = np.repeat(wide(v)[64:114].mean(axis=0), 2, axis=0)
        np.testing.assert_allclose(
            out, np.broadcast_to(mean, out.shape), atol=TOLERANCE[self.dtype]
        )
        score = wide(q).astype(np.float64).sum(axis=-1) / 8 + np.log(50)
        np.testing.assert_allclose(lse, score, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(("n_kv_heads", "group"), HEAD_SHAPES)
    def test_head_shapes(self, n_kv_heads, group):
        heads = (n_kv_heads, group)
        self.check([(0, 40, 0, 5), (64, 9, 5, 2)], heads=heads, dtype="bfloat16")

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_head_dims(self, head_dim):
        self.check([(32, 37, 0, 3)], head_dim=head_dim, dtype="bfloat16")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_dtypes(self, dtype):
        self.check([(32, 37, 0, 3)], dtype=dtype)

    @essential
    def test_slots_redirect_a_segment(self):
        slots = np.random.default_rng(9).permutation(200)[:90]
        self.check([(3, 70, 0, 4), (80, 10, 4, 1)], slots=slots)

    @essential
    def test_a_row_sees_no_key_after_its_position(self):
        self.check(
            [(0, 40, 0, 4), (64, 30, 2, 2)],
            row_positions=[0, 17, 40, 69, 0, 0, 0, 0],
            first_positions=[0, 40, 0, 0, 0],
        )

    @essential
    def test_tokens_of_a_chunk_see_their_own_and_the_ones_before(self):
        segments = [(0, 23, 0, 23), (23, 17, 23, 17)]
        self.check(segments, diagonals=[0, 23], n_rows=40, n_slots=128, heads=(1, 2))

    @essential
    def test_a_causal_segment_longer_than_its_tiles(self):
        self.check([(5, 187, 1, 40)], diagonals=[140], n_rows=41, heads=(1, 3), unused=np.nan)

    @pytest.mark.parametrize("diagonal", [61, 62, 63, 64, 126, 127, 128])
    def test_diagonals_around_a_tile_edge(self, diagonal):
        self.check([(0, 150, 0, 3)], diagonals=[diagonal])

    @essential
    def test_a_row_before_the_first_key_is_empty(self):
        _, lse = self.check([(64, 30, 0, 8)], diagonals=[61], heads=(1, 2))
        if len(lse):
            assert np.isneginf(lse[:3]).all()
            assert np.isfinite(lse[3:]).all()

    def test_rows_beyond_the_last_key_see_all(self):
        self.check([(64, 30, 0, 8)], diagonals=[90])

    def test_a_causal_segment_of_redirected_slots(self):
        slots = np.random.default_rng(9).permutation(200)[:96]
        self.check([(3, 70, 0, 8)], diagonals=[66], slots=slots, n_slots=200)

    @essential
    def test_partials_make_up_the_rows(self):
        self.check([(0, 170, 0, 6), (96, 90, 2, 3)], heads=(1, 4), partials=True)

    def test_causal_partials_make_up_the_rows(self):
        self.check([(0, 190, 0, 6)], diagonals=[60], partials=True)

    def test_repeated_runs_are_bitwise_equal(self):
        first = self.check([(0, 170, 0, 5)], heads=(1, 4))
        second = self.check([(0, 170, 0, 5)], heads=(1, 4))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)
