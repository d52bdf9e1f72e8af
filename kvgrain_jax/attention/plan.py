"""Decode plan: which rows share which contiguous keys, cut into tiles for the prefix kernels.

Enters the contiguous pieces of each row's context, leaves arrays of fixed shape. The plan changes
only when rows join or leave, so it is built on the host, once per entry of the decode loop.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvgrain_jax.errors import ConfigError
from pallas_kernels.implementation import runs_kernels
from pallas_kernels.segment_attention import Schedule, build_schedule, capacity_for
from pallas_kernels.segment_attention.schedule import ALIGNMENT


class HotPiece(NamedTuple):
    """A contiguous range of slots at the front of a row's context.

    ``owner`` names the prefix class: two rows share a piece if and only if the whole piece is
    equal, owner included. Sharing is never guessed from lengths or reference counts.
    """

    owner: int
    base: int
    length: int


class Segment(NamedTuple):
    """A contiguous range of keys and the run of adjacent rows that attends to it."""

    base: int
    length: int
    first_row: int
    n_rows: int


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile of one backend: how many rows and keys one unit of work covers."""

    row_tile: int
    kv_tile: int


DENSE_TILING = Tiling(row_tile=64, kv_tile=512)
CASCADE_TILING = Tiling(row_tile=8, kv_tile=128)
# Folded rows (row, head of the group) of a tile of the GPU kernels.
DENSE_FOLDED_ROWS, CASCADE_FOLDED_ROWS = 128, 64


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


def find_segments(rows: Sequence[Sequence[HotPiece]]) -> list[Segment]:
    """Segments of rows whose contexts begin with contiguous pieces.

    Adjacent rows that hold the same piece at the same depth share one segment (nested segments:
    system prompt, persona, history). Segments of the same rows that follow each other in memory
    (the halves of a split slab) become one.

    Args:
      rows: for each row of the batch its pieces, front of the context first. Rows that share
        pieces should be adjacent (sort them by their pieces).

    Returns:
      The segments, outermost first.
    """
    segments: list[Segment] = []
    depth = 0
    while any(len(pieces) > depth for pieces in rows):
        first = 0
        while first < len(rows):
            head = tuple(rows[first][: depth + 1])
            n = 1
            while first + n < len(rows) and tuple(rows[first + n][: depth + 1]) == head:
                n += 1
            if len(head) > depth:
                segments.append(Segment(head[-1].base, head[-1].length, first, n))
            first += n
        depth += 1
    joined: list[Segment] = []
    for segment in segments:
        for i, other in enumerate(joined):
            if other.base + other.length == segment.base and other[2:] == segment[2:]:
                joined[i] = other._replace(length=other.length + segment.length)
                break
        else:
            joined.append(segment)
    return joined


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
    diagonals: Sequence[int] | None = None,
) -> Schedule | None:
    """Schedule of the segments for the GPU kernels.

    None where there is no shape to schedule for, or so few slots that a tile of keys does not fit.

    Args:
      segments: the segments.
      kernels: the shape.
      n_rows: ``B``.
      n_slots: ``N``.
      max_segments: with ``n_rows`` decides the sizes of the arrays.
      folded_rows: folded rows of a tile.
      diagonals: for causal segments, the last slot that the first row of each sees.

    Raises:
      ConfigError: the segments nest too deeply.
    """
    if kernels is None or n_slots < kernels.kv_tile or n_slots % ALIGNMENT:
        return None
    shape = {
        "n_rows": n_rows,
        "n_kv_heads": kernels.n_kv_heads,
        "group": kernels.group,
        "row_tile": folded_rows,
        "n_workers": kernels.n_workers,
    }
    try:
        schedule = build_schedule(
            np.asarray(segments, np.int32).reshape(-1, 4),
            n_slots=n_slots,
            kv_tile=kernels.kv_tile,
            capacity=capacity_for(max_segments=max_segments, **shape),
            diagonals=None if diagonals is None else np.asarray(diagonals, np.int32),
            **shape,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return jax.tree.map(jnp.asarray, schedule)


def make_work_list(
    segments: Sequence[Segment],
    tiling: Tiling,
    capacity: int,
    *,
    causal: bool = False,
    schedule: Schedule | None = None,
) -> WorkList:
    """Cut segments into tiles; together they cover every visible (row, key) pair once.

    Args:
      segments: the segments.
      tiling: size of a tile.
      capacity: ``W``, entries of the list.
      causal: row ``i`` of a segment sees no key behind its ``i``-th; tiles that no row sees are
        left out.
      schedule: the same work for the GPU kernels.

    Raises:
      ConfigError: there are more tiles than ``capacity``.
    """
    parts = []
    for i, segment in enumerate(segments):
        row = np.arange(0, segment.n_rows, tiling.row_tile)
        kv = np.arange(0, segment.length, tiling.kv_tile)
        row, kv = np.repeat(row, kv.size), np.tile(kv, row.size)
        seen = kv < row + tiling.row_tile if causal else np.ones(kv.size, bool)
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
