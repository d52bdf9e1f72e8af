"""Decode plan: which rows share which contiguous keys, cut into tiles for the prefix kernels.

Enters the contiguous pieces of each row's context, leaves arrays of fixed shape. The plan changes
only when rows join or leave, so it is built on the host, once per entry of the decode loop.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvgrain_jax.errors import ConfigError


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkList:
    """Tiles of all segments, in the order the XLA specification takes them.

    Attributes:
      items: ``(segment, row offset, kv offset)``, int32, padded with zeros.
      n_items: how many entries of ``items`` count.
      tiling: size of a tile.
    """

    items: Int[Array, "W 3"]
    n_items: Int[Array, ""]
    tiling: Tiling = dataclasses.field(metadata={"static": True})


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
) -> DecodePlan:
    """Build the plan of a batch from its segments.

    The shapes of the result depend only on ``n_rows``, ``n_slots``, ``max_segments`` and the
    tilings, so that a new plan never recompiles the loop that takes it.

    Args:
      segments: the segments; a row may lie in several, never twice in the same slots.
      n_rows: ``B``, rows of the batch, padding included.
      n_slots: ``N``, slots of the pool that segments index.
      max_segments: ``C``, capacity of the plan.
      dense: tile of the dense backend.
      cascade: tile of the cascade backend.

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
    return DecodePlan(
        segments=jnp.asarray(table),
        n_segments=jnp.int32(len(segments)),
        starts=jnp.asarray(starts),
        dense=make_work_list(segments, dense, work_capacity(dense, n_rows, n_slots, max_segments)),
        cascade=make_work_list(
            segments, cascade, work_capacity(cascade, n_rows, n_slots, max_segments)
        ),
    )


def make_work_list(
    segments: Sequence[Segment],
    tiling: Tiling,
    capacity: int,
    *,
    visible: Callable[[int, int, int], bool] = lambda segment, row, kv: True,
) -> WorkList:
    """Cut segments into tiles; together they cover every visible (row, key) pair once.

    Args:
      segments: the segments.
      tiling: size of a tile.
      capacity: ``W``, entries of the list.
      visible: ``(segment, row offset, kv offset)`` to whether any row of the tile sees its keys.

    Raises:
      ConfigError: there are more tiles than ``capacity``.
    """
    items = [
        (i, row, kv)
        for i, segment in enumerate(segments)
        for row in range(0, segment.n_rows, tiling.row_tile)
        for kv in range(0, segment.length, tiling.kv_tile)
        if visible(i, row, kv)
    ]
    if len(items) > capacity:
        raise ConfigError(
            f"The segments need {len(items)} tiles of {tiling}, the work list holds {capacity}."
        )
    table = np.zeros((capacity, 3), np.int32)
    if items:
        table[: len(items)] = np.asarray(items, np.int32)
    return WorkList(items=jnp.asarray(table), n_items=jnp.int32(len(items)), tiling=tiling)


def work_capacity(tiling: Tiling, n_rows: int, n_slots: int, max_segments: int) -> int:
    """Tiles that ``max_segments`` segments over disjoint slots can need at most."""
    return -(-n_rows // tiling.row_tile) * (n_slots // tiling.kv_tile + max_segments)
