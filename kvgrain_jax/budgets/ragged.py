"""Attention over heads of different lengths: every KV head is a model of one KV head.

Enter queries ``[B, H, D]`` and, for each KV head, a run of keys somewhere in one array; leave partial
results for ``merge_row_partials``. Row ``b`` of head ``h`` has the number ``h * B + b``, so a segment is
a head and its rows. The lengths are known on the device only: the schedule of the GPU kernels is made
there, for all layers at once, by laying the work of all heads on one line and cutting it evenly.
Layers are told apart by a number in an array, not in the program, so that the compiler makes one kernel
for all of them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvgrain_jax.attention.plan import (
    DENSE_FOLDED_ROWS,
    KernelShape,
    Tiling,
    WorkList,
    kernel_shape,
    make_work_list,
)
from kvgrain_jax.attention.prefill import PREFILL_TILING, SegmentWork
from kvgrain_jax.attention.segments import Segment
from pallas_kernels import segment_partials
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.segment_attention import Schedule
from pallas_kernels.segment_attention import schedule as fields
from pallas_kernels.segment_attention.schedule import (
    ALIGNMENT,
    build_schedule,
    folded_rows,
    rows_of_tile,
)


def fold_heads(q: Float[Array, "B H D"], n_kv_heads: int) -> Float[Array, "KB G D"]:
    """Queries as rows of heads."""
    n_rows, _, head_dim = q.shape
    by_head = q.reshape(n_rows, n_kv_heads, -1, head_dim).swapaxes(0, 1)
    return by_head.reshape(n_kv_heads * n_rows, -1, head_dim)


def unfold_heads(partials: RowPartials, n_kv_heads: int) -> RowPartials:
    """Partials of rows of heads as those of rows and their KV heads."""

    def by_row(x):
        return x.reshape(n_kv_heads, -1, *x.shape[2:]).swapaxes(0, 1)

    return dataclasses.replace(
        partials, places=by_row(partials.places), counts=by_row(partials.counts[..., 0])
    )


def attend_runs(
    q: Float[Array, "B H D"],
    k: Float[Array, "*N D"],
    v: Float[Array, "*N D"],
    work: SegmentWork,
    *,
    n_kv_heads: int,
    causal: bool = False,
) -> RowPartials:
    """Partial results of the rows over the runs of one layer.

    Args:
      q: queries.
      k: vectors that the runs lie in, in the order of their memory.
      v: values.
      work: the runs, as ``of_layer`` and ``own_work`` give them.
      n_kv_heads: ``K``.
      causal: row ``b`` of a head sees the first ``b + 1`` keys of its run.
    """
    n_rows, _, head_dim = q.shape
    folded = fold_heads(q, n_kv_heads)
    keys, values = k.reshape(-1, 1, head_dim), v.reshape(-1, 1, head_dim)
    order = jnp.arange(n_rows, dtype=jnp.int32)
    found = segment_partials(
        folded,
        keys,
        values,
        work.segments,
        work.work.items,
        work.work.n_items,
        row_tile=min(work.work.tiling.row_tile, folded.shape[0]),
        kv_tile=min(work.work.tiling.kv_tile, keys.shape[0]),
        scale=head_dim**-0.5,
        row_positions=jnp.tile(order, n_kv_heads) if causal else None,
        first_positions=jnp.zeros(n_kv_heads, jnp.int32) if causal else None,
        schedule=work.work.schedule,
    )
    return unfold_heads(found, n_kv_heads)


def run_work(
    starts: Int[Array, "L K"],
    lengths: Int[Array, "L K"],
    *,
    n_rows: int,
    n_slots: int,
    most_keys: int,
    kernels: KernelShape | None,
    tiling: Tiling = PREFILL_TILING,
) -> SegmentWork:
    """Work of all layers where ``n_rows`` rows of every head attend to its run, for ``of_layer``.

    Args:
      starts: first key of each head's run.
      lengths: keys of it.
      n_rows: rows of a head.
      n_slots: keys of the array that the runs lie in.
      most_keys: keys of a run at most.
      kernels: shape to schedule the GPU kernels for, see ``head_kernels``.
      tiling: tile of the XLA specification.
    """
    first = jnp.broadcast_to(jnp.arange(starts.shape[1], dtype=jnp.int32) * n_rows, starts.shape)
    segments = jnp.stack([starts, lengths, first, jnp.full_like(first, n_rows)], axis=-1)
    tiles, n_tiles = ragged_tiles(segments, most_rows=n_rows, most_keys=most_keys, tiling=tiling)
    works = jax.vmap(lambda of_layer, n: SegmentWork(of_layer, WorkList(tiles, n, tiling=tiling)))
    return schedule_layers(
        works(segments, n_tiles),
        kernels,
        n_rows=starts.shape[1] * n_rows,
        most_rows=n_rows,
        least_rows=n_rows,
        n_slots=n_slots,
    )


def of_layer[Tree](layers: Tree, layer: int | Int[Array, ""]) -> Tree:
    """The part of one layer of arrays that have an axis of layers in front: of work, of gates."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, layer, axis=0, keepdims=False), layers
    )


def own_work(n_kv_heads: int, n_tokens: int, *, kernels: KernelShape | None) -> SegmentWork:
    """Work in which each token of a chunk attends, in each head, to itself and those before it."""
    first = np.arange(n_kv_heads, dtype=np.int32) * n_tokens
    segments = [Segment(start, n_tokens, start, n_tokens) for start in first.tolist()]
    tiling = PREFILL_TILING
    tiles = n_kv_heads * -(-n_tokens // tiling.row_tile) * -(-n_tokens // tiling.kv_tile)
    n_rows, schedule = n_kv_heads * n_tokens, None
    if kernels is not None and _fits(kernels, n_rows):
        schedule = build_schedule(
            np.asarray(segments, np.int32),
            n_rows=n_rows,
            n_slots=n_rows,
            n_kv_heads=1,
            group=kernels.group,
            row_tile=DENSE_FOLDED_ROWS,
            kv_tile=kernels.kv_tile,
            n_workers=kernels.n_workers,
            diagonals=first,
        )
    work = make_work_list(
        segments,
        tiling,
        tiles,
        earlier=[0] * len(segments),
        schedule=jax.tree.map(jnp.asarray, schedule),
    )
    return SegmentWork(jnp.asarray(segments, jnp.int32), work)


def head_kernels(n_heads: int, n_kv_heads: int, head_dim: int) -> KernelShape | None:
    """The shape of one KV head for this process's device; None where the GPU kernels do not run."""
    return kernel_shape(n_heads // n_kv_heads, 1, head_dim)


def schedule_layers(
    works: SegmentWork,
    kernels: KernelShape | None,
    *,
    n_slots: int,
    **rows: int,
) -> SegmentWork:
    """Add schedules to the work of all layers, where the GPU kernels can run.

    Args:
      works: of all layers, with an axis of layers in front.
      kernels: shape to schedule for, of one KV head.
      n_slots: keys of the array that the segments lie in.
      **rows: see ``ragged_schedule``.
    """
    if kernels is None or not _fits(kernels, n_slots):
        return works
    schedules = _schedules(works.segments, kernels, **rows)
    return dataclasses.replace(works, work=dataclasses.replace(works.work, schedule=schedules))


@partial(jax.jit, static_argnames=("kernels", "n_rows", "most_rows", "least_rows"))
def _schedules(segments: Int[Array, "L C 4"], kernels: KernelShape, **rows: int) -> Schedule:
    return jax.vmap(partial(ragged_schedule, kernels=kernels, **rows))(segments)


def _fits(kernels: KernelShape, n_slots: int) -> bool:
    return n_slots >= kernels.kv_tile and n_slots % ALIGNMENT == 0


def ragged_tiles(
    segments: Int[Array, "L C 4"], *, most_rows: int, most_keys: int, tiling: Tiling
) -> tuple[Int[Array, "W 3"], Int[Array, "L"]]:
    """Tiles of segments for the XLA specification: one list, and how much of it counts in each layer.

    What lies behind the longest run does not count; behind a shorter one it does, and is masked.

    Args:
      segments: ``(base, length, first_row, n_rows)``.
      most_rows: rows that a segment has at most.
      most_keys: its keys at most.
      tiling: size of a tile.
    """
    n_segments = segments.shape[1]
    key, segment, row = np.meshgrid(
        np.arange(0, most_keys, tiling.kv_tile),
        np.arange(n_segments),
        np.arange(0, most_rows, tiling.row_tile),
        indexing="ij",
    )
    work = np.stack([segment, row, key], axis=-1).reshape(-1, 3)
    n_keys = (jnp.max(segments[..., 1], axis=1) + tiling.kv_tile - 1) // tiling.kv_tile
    return jnp.asarray(work, jnp.int32), n_keys * (n_segments * row.shape[2])


def ragged_schedule(
    segments: Int[Array, "C 4"],
    kernels: KernelShape,
    *,
    n_rows: int,
    least_rows: int,
    most_rows: int,
) -> Schedule:
    """Schedule of the GPU kernels for segments whose lengths the host does not know.

    The key tiles of all row tiles lie on one line, which is cut into as many equal parts as there are
    workers: none has more to do than another, and a row's keys are cut at few places.

    Args:
      segments: ``(base, length, first_row, n_rows)``; a row lies in one at most.
      kernels: shape to schedule for, of one KV head.
      n_rows: rows in all.
      least_rows: rows of the smallest segment that has keys; fewer make the arrays larger.
      most_rows: rows of the largest segment.
    """
    group, row_tile, kv_tile = kernels.group, DENSE_FOLDED_ROWS, kernels.kv_tile
    rows = rows_of_tile(row_tile, group)
    n_tiles, n_workers = -(-most_rows // rows), kernels.n_workers
    max_pieces = n_workers // -(-least_rows // rows) + 2

    # Row tiles, those of one segment behind each other.
    def of_tile(x):
        return jnp.repeat(x, n_tiles, total_repeat_length=x.shape[0] * n_tiles)

    begin, length, first_row, own = (of_tile(x) for x in segments.T)
    offset = jnp.tile(jnp.arange(n_tiles, dtype=jnp.int32) * rows, segments.shape[0])
    row = first_row + offset
    last_tile = folded_rows(n_rows, group, row_tile) - row_tile
    folded = jnp.minimum(row * group // ALIGNMENT * ALIGNMENT, last_tile)
    start = begin // ALIGNMENT * ALIGNMENT
    steps = (begin + length - start + kv_tile - 1) // kv_tile
    steps = jnp.where((offset < own) & (length > 0), steps, 0)

    # The line, its parts, and the pieces that tiles and parts have in common.
    ends = jnp.cumsum(steps, dtype=jnp.int32)
    part = jnp.maximum(1, (ends[-1] + n_workers - 1) // n_workers)
    first_part = (ends - steps) // part
    n_pieces = jnp.where(steps > 0, (ends - 1) // part - first_part + 1, 0)
    items_until = jnp.cumsum(n_pieces, dtype=jnp.int32)
    n_items = n_tiles * segments.shape[0] + n_workers
    item = jnp.arange(n_items, dtype=jnp.int32)
    tile = jnp.searchsorted(items_until, item, side="right").astype(jnp.int32)
    real, tile = tile < steps.shape[0], jnp.minimum(tile, steps.shape[0] - 1)
    worker = first_part[tile] + item - (items_until - n_pieces)[tile]
    on_line = (ends - steps)[tile]
    first_step = jnp.maximum(on_line, worker * part) - on_line
    last_step = jnp.minimum(ends[tile], (worker + 1) * part) - on_line
    base = start[tile] + first_step * kv_tile
    n_steps = jnp.where(real, last_step - first_step, 0)
    kv_begin = jnp.maximum(begin[tile], base)
    kv_end = jnp.minimum((begin + length)[tile], base + n_steps * kv_tile)
    unseen = n_steps - (kv_end - base) // kv_tile + (kv_begin > base).astype(jnp.int32)
    columns = {
        fields.ROW: folded[tile],
        fields.BASE: base,
        fields.STEPS: n_steps,
        fields.MASKED: jnp.minimum(unseen, n_steps),
        fields.KV_BEGIN: kv_begin,
        fields.KV_END: kv_end,
    }
    nothing = jnp.zeros(n_items, jnp.int32)
    table = [jnp.where(real, columns.get(i, nothing), 0) for i in range(fields.FIELDS)]
    parts = jnp.arange(n_workers + 1, dtype=jnp.int32)
    worker_starts = jnp.searchsorted(jnp.where(real, worker, n_workers), parts, side="left")

    # Where the partials of each row are.
    nth = jnp.arange(rows, dtype=jnp.int32)[None, :]
    target = jnp.where(nth < (own - offset)[:, None], row[:, None] + nth, n_rows)
    which = jnp.broadcast_to(jnp.arange(row.shape[0], dtype=jnp.int32)[:, None], target.shape)
    none = jnp.full(n_rows, -1, jnp.int32)
    tile_of_row = none.at[target.reshape(-1)].set(which.reshape(-1), mode="drop")
    counts = jnp.where(tile_of_row >= 0, n_pieces[tile_of_row], 0)
    nth = jnp.arange(max_pieces, dtype=jnp.int32)[None, :]
    first_item = (items_until - n_pieces)[tile_of_row][:, None]
    in_tile = jnp.arange(n_rows, dtype=jnp.int32) * group - folded[tile_of_row]
    places = (first_item + nth) * row_tile + in_tile[:, None]
    return Schedule(
        items=jnp.stack(table, axis=1),
        worker_starts=worker_starts.astype(jnp.int32),
        places=jnp.where(nth < counts[:, None], places, -1)[:, None],
        counts=counts[:, None],
        row_tile=row_tile,
        kv_tile=kv_tile,
        causal=False,
    )
