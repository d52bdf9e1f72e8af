"""Decode plan: which rows share which contiguous keys, cut into tiles for the prefix kernels.

Enter segments, leave arrays of fixed shape. The plan changes only when rows join or leave, so it is
built on the host, once per entry of the decode loop.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvgrain_jax.attention.segments import Segment
from kvgrain_jax.errors import ConfigError
from pallas_kernels.implementation import runs_kernels
from pallas_kernels.segment_attention import (
    Capacity,
    Schedule,
    build_schedule,
    capacity_for,
    has_room,
)
from pallas_kernels.segment_attention.schedule import ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile of one backend: how many rows and keys one unit of work covers."""

    row_tile: int
    kv_tile: int


DENSE_TILING = Tiling(row_tile=64, kv_tile=512)
CASCADE_TILING = Tiling(row_tile=8, kv_tile=128)
# Folded rows (row, head of the group) of a tile of the GPU kernels.
DENSE_FOLDED_ROWS, CASCADE_FOLDED_ROWS = 128, 64
# Levels of nested segments that plans have tiles for: system prompt, persona, history.
MAX_LEVELS = 3


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """What a schedule of the GPU kernels depends on besides the segments.

    Attributes:
      n_kv_heads: ``K``, of one rank.
      group: ``G``.
      head_dim: ``D``.
      n_workers: persistent blocks: the multiprocessors of the device.
    """

    n_kv_heads: int
    group: int
    head_dim: int
    n_workers: int

    @property
    def kv_tile(self) -> int:
        """Keys of a tile: as many as leave room for several tiles in shared memory."""
        return 128 if self.head_dim <= 128 else 64


def kernel_shape(n_heads: int, n_kv_heads: int, head_dim: int) -> KernelShape | None:
    """The shape for this process's device; None where the GPU kernels do not run."""
    if not runs_kernels():
        return None
    workers = jax.local_devices()[0].core_count
    return KernelShape(n_kv_heads, n_heads // n_kv_heads, head_dim, workers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkList:
    """Tiles of all segments: for the XLA specification, and for the GPU kernels where they run.

    An axis of layers may stand in front of all arrays, see ``budgets.ragged``.

    Attributes:
      items: ``(segment, row offset, kv offset)``, int32, padded with zeros.
      n_items: how many entries of ``items`` count.
      schedule: the same work for the GPU kernels.
      tiling: size of a tile of ``items``.
    """

    items: Int[Array, "*layers W 3"]
    n_items: Int[Array, "*layers"]
    schedule: Schedule | None = None
    tiling: Tiling = dataclasses.field(default=DENSE_TILING, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The shared part of the attention of one batch.

    Attributes:
      segments: ``(base, length, first_row, n_rows)``, int32, padded with empty segments.
      n_segments: segments that count.
      starts: tokens at the front of each row's context that segments cover, int32; the rest, up
        to the row's length, is read through its page table.
      dense: work list of wide row tiles.
      cascade: work list of narrow row tiles.
    """

    segments: Int[Array, "C 4"]
    n_segments: Int[Array, ""]
    starts: Int[Array, "B"]
    dense: WorkList
    cascade: WorkList


def plan_holds(
    segments: Sequence[Segment],
    kernels: KernelShape | None,
    *,
    n_rows: int,
    max_segments: int,
    tiles: Sequence[int] = (DENSE_FOLDED_ROWS, CASCADE_FOLDED_ROWS),
) -> bool:
    """Whether a plan has room for segments, in its table and in the kernels' schedules.

    Args:
      segments: the segments.
      kernels: shape that the kernels are scheduled for.
      n_rows: ``B``.
      max_segments: ``C``.
      tiles: folded rows of a tile of each schedule.
    """
    if len(segments) > max_segments:
        return False
    if kernels is None:
        return True
    return all(
        has_room(
            _capacity(kernels, n_rows, max_segments, tile, MAX_LEVELS),
            np.asarray(segments, np.int32).reshape(-1, 4),
            n_kv_heads=kernels.n_kv_heads,
            group=kernels.group,
            row_tile=tile,
        )
        for tile in tiles
    )


def make_plan(
    segments: Sequence[Segment],
    *,
    n_rows: int,
    n_slots: int,
    max_segments: int,
    dense: Tiling = DENSE_TILING,
    cascade: Tiling = CASCADE_TILING,
    kernels: KernelShape | None = None,
) -> DecodePlan:
    """Build the plan of a batch from its segments.

    The shapes of the result depend only on ``n_rows``, ``n_slots``, ``max_segments``, the tilings
    and ``kernels``, so that a new plan never recompiles the loop that takes it.

    Args:
      segments: the segments; a row may lie in several, never twice in the same slots.
      n_rows: ``B``, rows of the batch, padding included.
      n_slots: ``N``, slots of the pool that segments index.
      max_segments: ``C``, capacity of the plan.
      dense: tile of the dense backend in the XLA specification.
      cascade: tile of the cascade backend there; that of ``dense`` is taken with ``kernels``, whose
        plans only need to be right for XLA, not fast.
      kernels: shape to schedule the GPU kernels for, see ``kernel_shape``.

    Raises:
      ConfigError: too many segments, or a segment outside the rows or the pool.
    """
    if len(segments) > max_segments:
        raise ConfigError(
            f"The batch has {len(segments)} segments, the plan holds {max_segments}; raise "
            "max_segments."
        )
    starts = np.zeros(n_rows, np.int32)
    for segment in segments:
        rows_fit = segment.first_row >= 0 and segment.first_row + segment.n_rows <= n_rows
        slots_fit = segment.base >= 0 and segment.base + segment.length <= n_slots
        if not rows_fit or not slots_fit or segment.length < 1 or segment.n_rows < 1:
            raise ConfigError(f"{segment} does not fit {n_rows} rows and {n_slots} slots.")
        starts[segment.first_row : segment.first_row + segment.n_rows] += segment.length
    table = np.zeros((max_segments, 4), np.int32)
    if segments:
        table[: len(segments)] = np.asarray(segments, np.int32)

    def work(tiling: Tiling, folded_rows: int) -> WorkList:
        return make_work_list(
            segments,
            tiling,
            work_capacity(tiling, n_rows, n_slots, max_segments),
            schedule=make_schedule(
                segments,
                kernels,
                n_rows=n_rows,
                n_slots=n_slots,
                max_segments=max_segments,
                folded_rows=folded_rows,
            ),
        )

    return DecodePlan(
        segments=jnp.asarray(table),
        n_segments=jnp.int32(len(segments)),
        starts=jnp.asarray(starts),
        dense=work(dense, DENSE_FOLDED_ROWS),
        cascade=work(dense if kernels else cascade, CASCADE_FOLDED_ROWS),
    )


def make_schedule(
    segments: Sequence[Segment],
    kernels: KernelShape | None,
    *,
    n_rows: int,
    n_slots: int,
    max_segments: int,
    folded_rows: int = DENSE_FOLDED_ROWS,
    levels: int = MAX_LEVELS,
    diagonals: Sequence[int] | None = None,
) -> Schedule | None:
    """Schedule of the segments for the GPU kernels.

    None where there is no shape to schedule for, or so few slots that a tile of keys does not fit.

    Args:
      segments: the segments.
      kernels: the shape.
      n_rows: ``B``.
      n_slots: ``N``.
      max_segments: segments at most.
      folded_rows: folded rows of a tile.
      levels: how deep segments nest; with ``n_rows`` and ``max_segments`` decides the sizes.
      diagonals: for causal segments, the last slot that the first row of each sees.

    Raises:
      ConfigError: the segments nest too deeply for the arrays, see ``plan_holds``.
    """
    if kernels is None or n_slots < kernels.kv_tile or n_slots % ALIGNMENT:
        return None
    try:
        schedule = build_schedule(
            np.asarray(segments, np.int32).reshape(-1, 4),
            n_rows=n_rows,
            n_slots=n_slots,
            n_kv_heads=kernels.n_kv_heads,
            group=kernels.group,
            row_tile=folded_rows,
            kv_tile=kernels.kv_tile,
            n_workers=kernels.n_workers,
            capacity=_capacity(kernels, n_rows, max_segments, folded_rows, levels),
            diagonals=None if diagonals is None else np.asarray(diagonals, np.int32),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return jax.tree.map(jnp.asarray, schedule)


def _capacity(
    kernels: KernelShape, n_rows: int, max_segments: int, folded_rows: int, levels: int
) -> Capacity:
    return capacity_for(
        n_rows=n_rows,
        n_kv_heads=kernels.n_kv_heads,
        group=kernels.group,
        row_tile=folded_rows,
        n_workers=kernels.n_workers,
        max_segments=max_segments,
        levels=levels,
    )


def make_work_list(
    segments: Sequence[Segment],
    tiling: Tiling,
    capacity: int,
    *,
    earlier: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> WorkList:
    """Cut segments into tiles; together they cover every visible (row, key) pair once.

    Args:
      segments: the segments.
      tiling: size of a tile.
      capacity: ``W``, entries of the list.
      earlier: for causal segments, how many keys of each lie before the one that its first row
        sees last: row ``i`` sees no key behind the ``earlier + i``-th, and tiles that no row sees
        are left out.
      schedule: the same work for the GPU kernels.

    Raises:
      ConfigError: there are more tiles than ``capacity``.
    """
    parts = []
    for i, segment in enumerate(segments):
        row = np.arange(0, segment.n_rows, tiling.row_tile)
        kv = np.arange(0, segment.length, tiling.kv_tile)
        row, kv = np.repeat(row, kv.size), np.tile(kv, row.size)
        seen = np.full(kv.size, True)
        if earlier is not None:
            seen = kv < earlier[i] + row + tiling.row_tile
        parts.append(np.stack([np.full(kv.size, i), row, kv], axis=1)[seen])
    items = np.concatenate([np.zeros((0, 3), np.int64), *parts])
    if len(items) > capacity:
        raise ConfigError(
            f"The segments need {len(items)} tiles of {tiling}, the work list holds {capacity}."
        )
    table = np.zeros((capacity, 3), np.int32)
    table[: len(items)] = items
    return WorkList(jnp.asarray(table), jnp.int32(len(items)), schedule, tiling)


def work_capacity(tiling: Tiling, n_rows: int, n_slots: int, max_segments: int) -> int:
    """Tiles that ``max_segments`` segments over disjoint slots can need at most."""
    return -(-n_rows // tiling.row_tile) * (n_slots // tiling.kv_tile + max_segments)
