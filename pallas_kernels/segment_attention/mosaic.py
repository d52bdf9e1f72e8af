"""Segment attention on Hopper (Pallas Mosaic GPU): enters a schedule, leaves partial results.

Persistent blocks of one memory warpgroup and one or two compute warpgroups. The memory warpgroup
streams key and value tiles by TMA into a ring; each compute warpgroup owns 64 folded rows and runs
QKᵀ, the online softmax in registers and PV. Two compute warpgroups take turns at the tensor cores,
so that the softmax of one hides under the products of the other.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.row_partials import RowPartials
from pallas_kernels.rows import fold_rows
from pallas_kernels.segment_attention import schedule as plan
from pallas_kernels.segment_attention.limits import WARPGROUP_ROWS, stages
from pallas_kernels.segment_attention.schedule import Schedule

LN2 = math.log(2.0)
ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def segment_partials(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    schedule: Schedule,
    *,
    scale,
    interpret=False,
) -> RowPartials:
    """See ``api.segment_partials``. Partials of items that no worker owns are not written."""
    head_dim, n_kv_heads = q.shape[-1], k.shape[1]
    kernel = _Kernel(
        n_slots=k.shape[0],
        head_dim=head_dim,
        group=q.shape[1] // n_kv_heads,
        dtype=q.dtype,
        row_tile=schedule.row_tile,
        kv_tile=schedule.kv_tile,
        causal=schedule.causal,
        stages=stages(schedule, head_dim),
        scale=scale * math.log2(math.e),
        interpret=interpret,
    )
    n_items = schedule.items.shape[0]
    outs, lses = plgpu.kernel(
        kernel.body,
        out_type=(
            jax.ShapeDtypeStruct((n_items, schedule.row_tile, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n_items, schedule.row_tile), jnp.float32),
        ),
        scratch_types=kernel.scratch(),
        grid=(schedule.worker_starts.shape[0] - 1,),
        grid_names=("worker",),
        num_threads=kernel.compute_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(
        fold_rows(q, n_kv_heads, plan.folded_rows(q.shape[0], kernel.group, schedule.row_tile)),
        k,
        v,
        jnp.asarray(schedule.items),
        jnp.asarray(schedule.worker_starts),
    )
    return schedule.partials(outs, lses)


class _Bounds(NamedTuple):
    """Which keys of a tile count, numbered from the tile's first: ``[begin, end)``.

    If causal, the row of folded row ``r`` sees keys up to ``diagonal + r // G``; ``first_row`` is
    the first folded row of the warpgroup.
    """

    begin: jax.Array
    end: jax.Array
    first_row: jax.Array
    diagonal: jax.Array


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel body for fixed shapes; ``scale`` includes log2(e)."""

    n_slots: int
    head_dim: int
    group: int
    dtype: jnp.dtype
    row_tile: int
    kv_tile: int
    causal: bool
    stages: int
    scale: float
    interpret: bool

    @property
    def compute_warpgroups(self):
        return self.row_tile // WARPGROUP_ROWS

    def scratch(self):
        swizzle = plgpu.find_swizzle(self.head_dim * 16)
        transforms = (
            plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
        )
        ring = (self.stages, self.kv_tile, self.head_dim)
        return (
            plgpu.SMEM(
                (self.compute_warpgroups, WARPGROUP_ROWS, self.head_dim),
                self.dtype,
                transforms=transforms,
            ),
            plgpu.SMEM(ring, self.dtype, transforms=transforms),
            plgpu.SMEM(ring, self.dtype, transforms=transforms),
            plgpu.Barrier(num_barriers=self.compute_warpgroups),
            plgpu.Barrier(num_barriers=self.stages),
            plgpu.Barrier(num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=self.compute_warpgroups, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=self.compute_warpgroups, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=self.compute_warpgroups),
        )

    def body(
        self,
        q_ref,  # [K, M, D]
        k_ref,  # [N, K, D]
        v_ref,  # [N, K, D]
        items_ref,  # [I, FIELDS]
        starts_ref,  # [W + 1]
        out_ref,  # [I, row_tile, D]
        lse_ref,  # [I, row_tile]
        q_smem,  # [warpgroups, 64, D]
        k_smem,  # [stages, kv_tile, D]
        v_smem,  # [stages, kv_tile, D]
        q_ready,
        k_ready,
        v_ready,
        k_free,
        v_free,
        turn,
    ):
        worker = lax.axis_index("worker")
        warpgroup = lax.axis_index("warpgroup")
        first_item, last_item = starts_ref[worker], starts_ref[worker + 1]

        @pl.when(warpgroup == self.compute_warpgroups)
        def _memory():
            plgpu.set_max_registers(40, action="decrease")

            def stream(item, step):
                head, base = items_ref[item, plan.HEAD], items_ref[item, plan.BASE]
                n_steps, begin = items_ref[item, plan.STEPS], items_ref[item, plan.KV_BEGIN]

                def load(i, step):
                    start, _ = self.tile_start(base, begin, i, n_steps)
                    slot = lax.rem(step, jnp.int32(self.stages))
                    source = (pl.ds(pl.multiple_of(start, plan.ALIGNMENT), self.kv_tile), head)

                    @pl.when(step >= self.stages)
                    def _():
                        plgpu.barrier_wait(k_free.at[slot])

                    plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[slot], k_ready.at[slot])

                    @pl.when(step >= self.stages)
                    def _():
                        plgpu.barrier_wait(v_free.at[slot])

                    plgpu.copy_gmem_to_smem(v_ref.at[source], v_smem.at[slot], v_ready.at[slot])
                    return step + 1

                return lax.fori_loop(jnp.int32(0), n_steps, load, step)

            lax.fori_loop(first_item, last_item, stream, jnp.int32(0))

        @pl.when(warpgroup < self.compute_warpgroups)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            rings = (k_smem, v_smem, k_ready, v_ready, k_free, v_free)
            rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            pl.when(warpgroup == 1)(functools.partial(self.meet, turn))

            def load_queries(item):
                head, row = items_ref[item, plan.HEAD], self.first_row(item, items_ref)
                source = q_ref.at[head, pl.ds(row, WARPGROUP_ROWS)]
                plgpu.copy_gmem_to_smem(source, q_smem.at[warpgroup], q_ready.at[warpgroup])

            def attend(item, step):
                plgpu.barrier_wait(q_ready.at[warpgroup])
                step, out, top, total = self.attend_item(
                    item, items_ref, step, q_smem.at[warpgroup], rings, turn
                )
                # The next queries arrive while this item's results leave.
                plgpu.commit_smem()  # no warp reads the old ones any more
                pl.when(item + 1 < last_item)(functools.partial(load_queries, item + 1))
                out_ref[item, rows] = out * lax.broadcast_in_dim(1.0 / total, out.shape, [0])
                lse_ref[item, rows] = (top + jnp.log2(total)) * LN2
                return step

            pl.when(first_item < last_item)(functools.partial(load_queries, first_item))
            lax.fori_loop(first_item, last_item, attend, jnp.int32(0))
            pl.when(warpgroup == 0)(functools.partial(self.meet, turn))

    def first_row(self, item, items_ref):
        """First folded row of this warpgroup."""
        row = items_ref[item, plan.ROW] + lax.axis_index("warpgroup") * WARPGROUP_ROWS
        return pl.multiple_of(row, plan.ALIGNMENT)

    def tile_start(self, base, begin, i, n_steps):
        """First slot of the ``i``-th tile to take, and the first slot that counts in it.

        The last tile comes first and so on down, but for a first tile that holds slots before
        ``begin``: that comes before all others. So the tiles that need a mask come first.
        """
        tile = lax.rem(n_steps - jnp.where(begin > base, 0, 1) - i + n_steps, n_steps)
        nominal = base + tile * self.kv_tile
        return jnp.minimum(nominal, self.n_slots - self.kv_tile), nominal

    def attend_item(self, item, items_ref, step, q_smem, rings, turn):
        """All key tiles of one item: ``(step, out, top, total)`` of 64 rows, in base 2."""
        base, n_steps = items_ref[item, plan.BASE], items_ref[item, plan.STEPS]
        n_masked = items_ref[item, plan.MASKED]
        begin, end = items_ref[item, plan.KV_BEGIN], items_ref[item, plan.KV_END]
        first_row, diagonal = self.first_row(item, items_ref), items_ref[item, plan.DIAGONAL]

        def bounds(i):
            start, nominal = self.tile_start(base, begin, i, n_steps)
            return _Bounds(
                jnp.maximum(begin, nominal) - start, end - start, first_row, diagonal - start
            )

        per_row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            step,
            plgpu.layout_cast(
                jnp.zeros((WARPGROUP_ROWS, self.head_dim), jnp.float32), plgpu.Layout.WGMMA
            ),
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), per_row),
        )
        attend = functools.partial(self.attend_tile, q_smem, rings, turn)

        def masked_tile(i, state):
            return attend(state, bounds(i))

        def whole_tile(_, state):
            return attend(state, None)

        state = lax.fori_loop(jnp.int32(0), n_masked, masked_tile, state)
        return lax.fori_loop(n_masked, n_steps, whole_tile, state)

    def attend_tile(self, q_smem, rings, turn, state, bounds):
        """Take in one tile. ``bounds``: which of its keys count; None for all."""
        k_smem, v_smem, k_ready, v_ready, k_free, v_free = rings
        step, out, top, total = state
        slot = lax.rem(step, jnp.int32(self.stages))
        if bounds is not None:
            plgpu.barrier_wait(v_ready.at[slot])
            self.clear_values(v_smem.at[slot], bounds)
        plgpu.barrier_wait(k_ready.at[slot])
        scores = self.scores(q_smem, k_smem.at[slot], functools.partial(self.meet, turn))
        plgpu.barrier_arrive(k_free.at[slot])
        weights, decay, top, total = self.softmax(scores, top, total, bounds)
        out = out * lax.broadcast_in_dim(decay, out.shape, [0])
        weights = weights.astype(self.dtype)
        out, top, total, weights = lax.optimization_barrier((out, top, total, weights))
        if bounds is None:
            plgpu.barrier_wait(v_ready.at[slot])
        self.meet(turn)
        out = self.weigh(out, weights, v_smem.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
        return step + 1, out, top, total

    def scores(self, q_smem, k_tile, issued):
        """``QKᵀ`` of one tile; ``issued`` runs when the tensor cores have got it to do."""

        def product(accumulator):
            plgpu.wgmma(accumulator, q_smem, k_tile.transpose((1, 0)))
            issued()
            return accumulator[...]

        return pl.run_scoped(product, ACC((WARPGROUP_ROWS, self.kv_tile), jnp.float32))

    def softmax(self, scores, top, total, bounds):
        """Online softmax in base 2: ``(weights, decay, top, total)``."""
        if bounds is not None:
            scores = jnp.where(self.visible(bounds), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1) * self.scale)
        finite_top = new_top
        if bounds is not None and self.causal:  # a row may have seen no key yet
            finite_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        decay = jnp.exp2(top - finite_top)
        finite_top = lax.broadcast_in_dim(finite_top, scores.shape, [0])
        weights = jnp.exp2(scores * self.scale - finite_top)
        return weights, decay, new_top, total * decay + weights.sum(axis=1)

    def weigh(self, out, weights, v_tile):
        """``out + weights · V`` of one tile."""
        if self.interpret:  # the interpreter has no product with an operand in registers
            return out + jnp.dot(weights, v_tile[...], preferred_element_type=jnp.float32)

        def product(accumulator):
            plgpu.wgmma(accumulator, weights, v_tile)

        return pl.run_state(product)(ACC.init(out))

    def meet(self, turn):
        """Meet the other compute warpgroup: one leaves the tensor cores as the other enters."""
        if self.compute_warpgroups > 1:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def visible(self, bounds):
        """Which of its keys each row of a tile sees: ``[64, kv_tile]``."""

        def index(axis):
            shape = (WARPGROUP_ROWS, self.kv_tile)
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

        key = index(1)
        mask = (key >= bounds.begin) & (key < bounds.end)
        if self.causal:  # key <= diagonal + folded row // group, without the division
            mask &= (key - bounds.diagonal) * self.group <= bounds.first_row + index(0)
        return mask

    def clear_values(self, v_tile, bounds):
        """Zero the values outside the range: 0 × NaN of an unused slot is NaN.

        Each compute warpgroup clears its share. Taking turns orders the shares: a warpgroup
        weighs the values only after the other has passed its clearing.
        """
        shape = (WARPGROUP_ROWS, self.head_dim)

        def clear(first):
            part = v_tile.at[pl.ds(first, WARPGROUP_ROWS)]
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            inside = (key >= bounds.begin) & (key < bounds.end)
            part[...] = jnp.where(inside, values, jnp.zeros_like(values))

        @pl.when((bounds.begin > 0) | (bounds.end < self.kv_tile))
        def _():
            for share in range(self.kv_tile // WARPGROUP_ROWS):
                mine = lax.axis_index("warpgroup") == share % self.compute_warpgroups
                pl.when(mine)(functools.partial(clear, share * WARPGROUP_ROWS))
            plgpu.commit_smem()
