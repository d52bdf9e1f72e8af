"""Split-KV decode on Hopper (Pallas Mosaic GPU): one bulk copy for each page, all KV heads of it.

An item is one row and one of its parts; a block takes two, which share nothing. For each, a memory
warpgroup issues a copy for each page into a ring of tiles, and a compute warpgroup runs QKᵀ, the
online softmax and PV. A tile is a matrix whose rows are (token, KV head) as they lie in the pool: a
copy of a token alone is then whole 8-row tiles of the swizzled layout, which a copy of one head of
one token is not. All query heads meet all rows of the tile in one product, and a mask keeps the
pairs of the same KV head. That multiplies no more than one product a KV head would, since a product
has at least 64 query rows in any case.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.merge import triton as merge
from pallas_kernels.split_kv_decode.limits import ITEMS, QUERY_ROWS, TILE_ROWS, stages
from pallas_kernels.split_kv_decode.splits import even_splits, split_partials

LN2 = math.log(2.0)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def split_kv_decode(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    pages,  # [B, T]
    starts,  # [B]
    lengths,  # [B] or [B, K]
    *,
    page_size,
    scale,
    splits=None,
    order=None,
    prefix=None,
    out_dtype=jnp.float32,
    interpret=False,
):
    """See ``api.split_kv_decode``."""
    n_rows, n_heads, head_dim = q.shape
    n_slots, n_kv_heads, _ = k.shape
    if splits is None:
        splits = (even_splits(n_rows, pages.shape[1] * page_size),) * n_kv_heads
    n_splits = splits[0]
    kernel = _Kernel(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        page_size=page_size,
        n_splits=n_splits,
        per_head=lengths.ndim == 2,
        scale=scale * math.log2(math.e),
        interpret=interpret,
    )
    pool = (n_slots // kernel.copy_tokens, kernel.copy_tokens * n_kv_heads, head_dim)
    outs, lses = plgpu.kernel(
        kernel.body,
        out_type=(
            jax.ShapeDtypeStruct((n_splits, n_rows, QUERY_ROWS, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n_splits, n_rows, QUERY_ROWS), jnp.float32),
        ),
        scratch_types=kernel.scratch(),
        grid=(-(-n_rows * n_splits // ITEMS),),
        grid_names=("block",),
        num_threads=2 * ITEMS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(
        q,
        k.reshape(pool),
        v.reshape(pool),
        pages,
        starts,
        lengths.reshape(n_rows, -1),
        jnp.arange(n_rows, dtype=jnp.int32) if order is None else order,
    )
    parts = [split_partials(outs, lses, splits, n_heads // n_kv_heads)]
    if prefix is not None:
        parts.append(prefix)
    return merge.merge_row_partials(
        parts, n_heads=n_heads, out_dtype=out_dtype, interpret=interpret
    )


class _Part(NamedTuple):
    """One row's tiles ``[first, last)``, of which ``[whole, last)`` hold tokens that do not count.

    ``ends``: token after the last, of all heads or of each; ``longest``: the largest of them.
    """

    row: jax.Array
    split: jax.Array
    start: jax.Array
    ends: list[jax.Array]
    longest: jax.Array
    first: jax.Array
    whole: jax.Array
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel body for fixed shapes; ``scale`` includes log2(e)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    page_size: int
    n_splits: int
    per_head: bool
    scale: float
    interpret: bool

    @property
    def tile_tokens(self):
        return TILE_ROWS // self.n_kv_heads

    @property
    def copy_tokens(self):
        """Tokens of one copy: a page, or a tile's worth of a page that is larger."""
        return min(self.page_size, self.tile_tokens)

    @property
    def tile_copies(self):
        return self.tile_tokens // self.copy_tokens

    @property
    def stages(self):
        return stages(self.head_dim)

    def scratch(self):
        swizzle = plgpu.find_swizzle(self.head_dim * 16)
        transforms = (
            plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
        )
        ring = (ITEMS * self.stages, TILE_ROWS, self.head_dim)
        return (
            plgpu.SMEM((ITEMS, QUERY_ROWS, self.head_dim), self.dtype, transforms=transforms),
            plgpu.SMEM(ring, self.dtype, transforms=transforms),
            plgpu.SMEM(ring, self.dtype, transforms=transforms),
            plgpu.Barrier(num_barriers=ITEMS),
            plgpu.Barrier(num_arrivals=self.tile_copies, num_barriers=ring[0]),
            plgpu.Barrier(num_arrivals=self.tile_copies, num_barriers=ring[0]),
            plgpu.Barrier(num_barriers=ring[0]),
            plgpu.Barrier(num_barriers=ring[0]),
        )

    def body(
        self,
        q_ref,  # [B, H, D]
        k_ref,  # [N / copy_tokens, copy_tokens · K, D]
        v_ref,  # [N / copy_tokens, copy_tokens · K, D]
        pages_ref,  # [B, T]
        starts_ref,  # [B]
        lengths_ref,  # [B, 1] or [B, K]
        order_ref,  # [B]
        out_ref,  # [S, B, 64, D]
        lse_ref,  # [S, B, 64]
        q_smem,  # [items, 64, D]
        k_smem,  # [items · stages, 64, D]
        v_smem,  # [items · stages, 64, D]
        q_ready,
        k_ready,
        v_ready,
        k_free,
        v_free,
    ):
        warpgroup = lax.axis_index("warpgroup")
        own = lax.rem(warpgroup, jnp.int32(ITEMS))  # which of the block's items
        item = lax.axis_index("block") * ITEMS + own
        exists = item < q_ref.shape[0] * self.n_splits
        keys = (k_ref, k_smem, k_ready, k_free)
        values = (v_ref, v_smem, v_ready, v_free)

        @pl.when(warpgroup >= ITEMS)
        def _memory():
            plgpu.set_max_registers(40, action="decrease")

            @pl.when(exists)
            def _():
                part = self.part(item, starts_ref, lengths_ref, order_ref)
                self.stream(part, own, pages_ref, keys, values)

        @pl.when(warpgroup < ITEMS)
        def _compute():
            plgpu.set_max_registers(208, action="increase")

            @pl.when(exists)
            def _():
                part = self.part(item, starts_ref, lengths_ref, order_ref)
                heads = pl.ds(0, self.n_heads)
                plgpu.copy_gmem_to_smem(q_ref.at[part.row], q_smem.at[own, heads], q_ready.at[own])
                plgpu.barrier_wait(q_ready.at[own])
                out, top, total = self.attend(part, own, q_smem.at[own], keys, values)
                divisor = jnp.where(total == 0.0, 1.0, total)
                out = out / lax.broadcast_in_dim(divisor, out.shape, [0])
                out_ref[part.split, part.row] = out
                lse_ref[part.split, part.row] = jnp.where(
                    total == 0.0, -jnp.inf, (top + jnp.log2(divisor)) * LN2
                )

    def part(self, item, starts_ref, lengths_ref, order_ref):
        """The row, the part of it and the tiles that an item is."""
        row = order_ref[lax.div(item, jnp.int32(self.n_splits))]
        split = lax.rem(item, jnp.int32(self.n_splits))
        start = starts_ref[row]
        ends = [lengths_ref[row, i] for i in range(lengths_ref.shape[1])]
        longest, shortest = ends[0], ends[0]
        for end in ends[1:]:
            longest, shortest = jnp.maximum(longest, end), jnp.minimum(shortest, end)
        tokens = jnp.int32(self.tile_tokens)
        n_tiles = lax.div(jnp.maximum(longest - start, 0) + tokens - 1, tokens)
        share = lax.div(n_tiles + self.n_splits - 1, jnp.int32(self.n_splits))
        first = jnp.minimum(split * share, n_tiles)
        last = jnp.minimum(first + share, n_tiles)
        whole = jnp.clip(lax.div(jnp.maximum(shortest - start, 0), tokens), first, last)
        return _Part(row, split, start, ends, longest, first, whole, last)

    def stream(self, part, own, pages_ref, keys, values):
        """Copy the part's tiles into the ring of the block's item ``own``."""
        rows = self.copy_tokens * self.n_kv_heads
        copies_per_page = self.page_size // self.copy_tokens

        def places_of(tile):
            """Where in the pool the tile's copies come from, in units of a copy."""
            # Past the end the last copy comes again: no slot is read that is nobody's.
            end = lax.div(part.longest - 1, self.copy_tokens)
            first = lax.div(part.start + tile * self.tile_tokens, self.copy_tokens)
            copies = [jnp.minimum(first + i, end) for i in range(self.tile_copies)]
            pages = [pages_ref[part.row, lax.div(copy, copies_per_page)] for copy in copies]
            return tuple(
                page * copies_per_page + lax.rem(copy, copies_per_page)
                for page, copy in zip(pages, copies, strict=True)
            )

        def load(tile, places):
            step = tile - part.first
            slot = own * self.stages + lax.rem(step, jnp.int32(self.stages))
            following = places_of(tile + 1)  # on their way while the copies are issued
            for ref, smem, ready, free in (keys, values):

                @pl.when(step >= self.stages)
                def _(free=free):
                    plgpu.barrier_wait(free.at[slot])

                for i, place in enumerate(places):
                    target = smem.at[slot, pl.ds(i * rows, rows)]
                    plgpu.copy_gmem_to_smem(ref.at[place], target, ready.at[slot])
            return following

        @pl.when(part.first < part.last)
        def _():
            lax.fori_loop(part.first, part.last, load, places_of(part.first))

            # Whoever waits on a barrier sees each of its phases, the last one too.
            def drain(i, _):
                for _, _, _, free in (keys, values):
                    plgpu.barrier_wait(free.at[own * self.stages + i])

            used = jnp.minimum(part.last - part.first, self.stages)
            lax.fori_loop(jnp.int32(0), used, drain, None)

    def attend(self, part, own, q_smem, keys, values):
        """All tiles of a part: ``(out, top, total)`` of 64 query rows, in base 2."""

        def tiles(masked):
            def tile(i, state):
                done = part.start + i * self.tile_tokens
                left = [end - done for end in part.ends] if masked else None
                slot = own * self.stages + lax.rem(i - part.first, jnp.int32(self.stages))
                return self.attend_tile(state, slot, q_smem, keys[1:], values[1:], left)

            return tile

        per_row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            plgpu.layout_cast(
                jnp.zeros((QUERY_ROWS, self.head_dim), jnp.float32), plgpu.Layout.WGMMA
            ),
            plgpu.layout_cast(jnp.full((QUERY_ROWS,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), per_row),
        )
        state = lax.fori_loop(part.first, part.whole, tiles(False), state)
        return lax.fori_loop(part.whole, part.last, tiles(True), state)

    def attend_tile(self, state, slot, q_smem, keys, values, left):
        """Take in one tile. ``left``: its tokens that count, of all heads or of each; None for all."""
        k_smem, k_ready, k_free = keys
        v_smem, v_ready, v_free = values
        out, top, total = state
        shape = (QUERY_ROWS, TILE_ROWS)
        if left is not None:
            plgpu.barrier_wait(v_ready.at[slot])
            self.clear_values(v_smem.at[slot], left)
        plgpu.barrier_wait(k_ready.at[slot])

        def scores_of(accumulator):
            plgpu.wgmma(accumulator, q_smem, k_smem.at[slot].transpose((1, 0)))
            return accumulator[...]

        scores = pl.run_scoped(scores_of, ACC(shape, jnp.float32))
        plgpu.barrier_arrive(k_free.at[slot])
        query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        kept = lax.rem(column, self.n_kv_heads) == lax.div(query, self.n_heads // self.n_kv_heads)
        if left is not None:
            kept &= self.counts(column, left)
        scores = jnp.where(kept, scores * self.scale, -jnp.inf)

        new_top = jnp.maximum(top, scores.max(axis=1))
        finite_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        decay = jnp.exp2(top - finite_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(finite_top, shape, [0]))
        total = total * decay + weights.sum(axis=1)
        out = out * lax.broadcast_in_dim(decay, out.shape, [0])
        narrow = weights.astype(self.dtype)
        out, total, new_top, narrow = lax.optimization_barrier((out, total, new_top, narrow))
        if left is None:
            plgpu.barrier_wait(v_ready.at[slot])

        if self.interpret:  # the interpreter has no product with an operand in registers
            out += jnp.dot(narrow, v_smem[slot], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # orders this read, which is then none of the tensor cores
        else:

            def weigh(accumulator):
                plgpu.wgmma(accumulator, narrow, v_smem.at[slot])

            out = pl.run_state(weigh)(ACC.init(out))
        plgpu.barrier_arrive(v_free.at[slot])
        return out, new_top, total

    def counts(self, tile_row, left):
        """Whether rows (token, KV head) of a tile lie before their head's end."""
        token = lax.div(tile_row, self.n_kv_heads)
        if not self.per_head:
            return token < left[0]
        head, limit = lax.rem(tile_row, self.n_kv_heads), jnp.zeros_like(tile_row)
        for i, tokens in enumerate(left):
            limit = jnp.where(head == i, tokens, limit)
        return token < limit

    def clear_values(self, v_tile, left):
        """Zero the values that do not count: 0 × NaN of an unused slot is NaN."""
        shape = (TILE_ROWS, self.head_dim)
        tile_row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(v_tile, layout=plgpu.Layout.WGMMA)
        v_tile[...] = jnp.where(self.counts(tile_row, left), values, jnp.zeros_like(values))
        plgpu.commit_smem()
