"""Segment attention on Hopper (Pallas Mosaic GPU): enters a schedule, leaves partial results.

Persistent blocks of one memory warpgroup and one or two compute warpgroups. The memory warpgroup
streams key and value tiles by TMA into a ring; each compute warpgroup owns 64 folded rows and runs
QKᵀ, the online softmax in registers and PV. Two compute warpgroups take turns at the tensor cores,
so that the softmax of one hides under the products of the other.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.segment_attention import schedule as plan
from pallas_kernels.segment_attention.limits import WARPGROUP_ROWS, stages
from pallas_kernels.segment_attention.merge_triton import merge_pieces
from pallas_kernels.segment_attention.rows import gather_rows
from pallas_kernels.segment_attention.schedule import Schedule

LN2 = math.log(2.0)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def segment_attention(q, k, v, schedule: Schedule, *, scale, interpret=False):
    """See ``api.segment_attention``."""
    outs, lses = segment_partials(q, k, v, schedule, scale=scale, interpret=interpret)
    return merge_pieces(outs, lses, schedule, q.shape[1], interpret=interpret)


def segment_partials(q, k, v, schedule: Schedule, *, scale, interpret=False):
    """Partial results of the schedule's items: ``[I, row_tile, D]`` and ``[I, row_tile]`` float32.

    Partials of items that no worker owns are not written.
    """
    head_dim = q.shape[-1]
    kernel = _Kernel(
        n_slots=k.shape[0],
        head_dim=head_dim,
        dtype=q.dtype,
        row_tile=schedule.row_tile,
        kv_tile=schedule.kv_tile,
        stages=stages(schedule, head_dim),
        scale=scale * math.log2(math.e),
        interpret=interpret,
    )
    n_items = schedule.items.shape[0]
    return plgpu.kernel(
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
        gather_rows(q, schedule),
        k,
        v,
        jnp.asarray(schedule.items),
        jnp.asarray(schedule.worker_starts),
    )


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel body for fixed shapes; ``scale`` includes log2(e)."""

    n_slots: int
    head_dim: int
    dtype: jnp.dtype
    row_tile: int
    kv_tile: int
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
        q_ref,  # [T, K, row_tile, D]
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
                n_steps = items_ref[item, plan.STEPS]

                def load(i, step):
                    start, _ = self.tile_start(base, i, n_steps)
                    slot = lax.rem(step, jnp.int32(self.stages))
                    source = (pl.ds(pl.multiple_of(start, plan.KV_ALIGNMENT), self.kv_tile), head)

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
            take_turn = functools.partial(_take_turn, turn, self.compute_warpgroups)
            pl.when(warpgroup == 1)(take_turn)

            def attend(item, step):
                head, tile = items_ref[item, plan.HEAD], items_ref[item, plan.TILE]
                plgpu.copy_gmem_to_smem(
                    q_ref.at[tile, head, rows], q_smem.at[warpgroup], q_ready.at[warpgroup]
                )
                plgpu.barrier_wait(q_ready.at[warpgroup])
                step, out, top, total = self.attend_item(
                    item, items_ref, step, q_smem.at[warpgroup], rings, turn
                )
                out_ref[item, rows] = out / lax.broadcast_in_dim(total, out.shape, [0])
                lse_ref[item, rows] = (top + jnp.log2(total)) * LN2
                return step

            lax.fori_loop(first_item, last_item, attend, jnp.int32(0))
            pl.when(warpgroup == 0)(take_turn)

    def tile_start(self, base, i, n_steps):
        """First slot of the ``i``-th tile to take, and the first slot that counts in it."""
        tile = jnp.where(i == 0, n_steps - 1, i - 1)
        nominal = base + tile * self.kv_tile
        return jnp.minimum(nominal, self.n_slots - self.kv_tile), nominal

    def attend_item(self, item, items_ref, step, q_smem, rings, turn):
        """All key tiles of one item: ``(step, out, top, total)`` of 64 rows, in base 2."""
        base, n_steps = items_ref[item, plan.BASE], items_ref[item, plan.STEPS]
        n_masked = items_ref[item, plan.MASKED]
        begin, end = items_ref[item, plan.KV_BEGIN], items_ref[item, plan.KV_END]

        def masked_tile(i, state):
            start, nominal = self.tile_start(base, i, n_steps)
            bounds = (jnp.maximum(begin, nominal) - start, end - start)
            return self.attend_tile(state, q_smem, rings, turn, bounds)

        def whole_tile(i, state):
            return self.attend_tile(state, q_smem, rings, turn, None)

        per_row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            step,
            plgpu.layout_cast(
                jnp.zeros((WARPGROUP_ROWS, self.head_dim), jnp.float32), plgpu.Layout.WGMMA
            ),
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), per_row),
        )
        state = lax.fori_loop(jnp.int32(0), n_masked, masked_tile, state)
        return lax.fori_loop(n_masked, n_steps, whole_tile, state)

    def attend_tile(self, state, q_smem, rings, turn, bounds):
        """Take in one tile. ``bounds``: the keys ``[begin, end)`` of it that count; None for all."""
        k_smem, v_smem, k_ready, v_ready, k_free, v_free = rings
        step, out, top, total = state
        slot = lax.rem(step, jnp.int32(self.stages))
        tile_shape = (WARPGROUP_ROWS, self.kv_tile)
        take_turn = functools.partial(_take_turn, turn, self.compute_warpgroups)

        if bounds is not None:
            plgpu.barrier_wait(v_ready.at[slot])
            self.clear_values(v_smem.at[slot], bounds)
        plgpu.barrier_wait(k_ready.at[slot])

        def scores_of(accumulator):
            plgpu.wgmma(accumulator, q_smem, k_smem.at[slot].transpose((1, 0)))
            take_turn()
            return accumulator[...]

        scores = pl.run_scoped(scores_of, ACC(tile_shape, jnp.float32))
        plgpu.barrier_arrive(k_free.at[slot])
        if bounds is not None:
            key = plgpu.broadcasted_iota(jnp.int32, tile_shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where((key >= bounds[0]) & (key < bounds[1]), scores, -jnp.inf)

        new_top = jnp.maximum(top, scores.max(axis=1) * self.scale)
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * self.scale - lax.broadcast_in_dim(new_top, tile_shape, [0]))
        total = total * decay + weights.sum(axis=1)
        out = out * lax.broadcast_in_dim(decay, out.shape, [0])
        narrow = weights.astype(self.dtype)
        out, total, new_top, narrow = lax.optimization_barrier((out, total, new_top, narrow))
        if bounds is None:
            plgpu.barrier_wait(v_ready.at[slot])
        take_turn()

        if self.interpret:  # the interpreter has no product with an operand in registers
            out += jnp.dot(narrow, v_smem[slot], preferred_element_type=jnp.float32)
        else:

            def weigh(accumulator):
                plgpu.wgmma(accumulator, narrow, v_smem.at[slot])

            out = pl.run_state(weigh)(ACC.init(out))
        plgpu.barrier_arrive(v_free.at[slot])
        return step + 1, out, new_top, total

    def clear_values(self, v_tile, bounds):
        """Zero the values outside ``bounds``: 0 × NaN of an unused slot is NaN.

        Each compute warpgroup clears its share. Taking turns orders the shares: a warpgroup
        weighs the values only after the other has passed its clearing.
        """
        shape = (WARPGROUP_ROWS, self.head_dim)

        def clear(first):
            part = v_tile.at[pl.ds(first, WARPGROUP_ROWS)]
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            inside = (key >= bounds[0]) & (key < bounds[1])
            part[...] = jnp.where(inside, values, jnp.zeros_like(values))

        for share in range(self.kv_tile // WARPGROUP_ROWS):
            mine = lax.axis_index("warpgroup") == share % self.compute_warpgroups
            pl.when(mine)(functools.partial(clear, share * WARPGROUP_ROWS))
        plgpu.commit_smem()


def _take_turn(turn, compute_warpgroups):
    """Meet the other compute warpgroup: one leaves the tensor cores as the other enters."""
    if compute_warpgroups > 1:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)
