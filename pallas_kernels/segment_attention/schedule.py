"""Work of the GPU kernels of segment attention: enters segments, leaves a schedule. Plan time, NumPy.

A *unit* is one row tile of one segment. For each KV head its keys are cut into *pieces*, so that
the pieces fill the workers (persistent blocks) evenly whatever the segments' lengths and row
counts. Each piece leaves one partial result; ``places`` says which partials make up a row.

Rows are *folded*: folded row ``b · G + g`` is head ``g`` of the group in row ``b``. Rows of a segment
are adjacent, so a row tile is a run of folded rows. It starts at a multiple of 8 and may hold rows
that are not its own; nobody reads their partials.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from pallas_kernels import tuning
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.segment_attention.balance import Cuts, balance

ALIGNMENT = 8  # a TMA tile with swizzle starts at a multiple of 8 rows
HEAD, ROW, BASE, STEPS, MASKED, KV_BEGIN, KV_END, DIAGONAL, FIELDS = range(9)

type Ints = Int[np.ndarray, "..."] | Int[jax.Array, "..."]


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Array sizes of a schedule, fixed so that a new plan never recompiles the program it enters.

    Attributes:
      items: pieces of all workers, ``I``.
      pieces: partials of a row, ``S``.
    """

    items: int
    pieces: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which worker computes which piece, and where the partials of each row are.

    Attributes:
      items: ``[I, 8]`` int32, one piece each: KV head, first folded row of the row tile, first slot
        of the first key tile (both multiples of 8), number of key tiles, how many of them are not
        seen whole by every row, the range of slots ``[begin, end)``, and, if causal, what to add
        to a row's number for the last slot that it sees. Item ``i`` writes partial ``i``.
      worker_starts: ``[W + 1]`` int32, worker ``w`` computes the items
        ``[worker_starts[w], worker_starts[w + 1])``.
      places: ``[B, K, S]`` int32, for each row and KV head its partials, as
        ``item · row_tile + folded row of the tile``; -1 where there are fewer than ``S``.
      counts: ``[B, K]`` int32, how many partials each row and KV head has.
      row_tile: folded rows of a tile.
      kv_tile: keys of a tile.
      causal: whether rows see slots up to their own last one only.
    """

    items: Ints
    worker_starts: Ints
    places: Ints
    counts: Ints
    row_tile: int = dataclasses.field(metadata={"static": True})
    kv_tile: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})

    def partials(self, outs: jax.Array, lses: jax.Array) -> RowPartials:
        """What the items leave: ``outs [I, row_tile, D]`` and ``lses [I, row_tile]``."""
        return RowPartials(
            outs=outs.reshape(-1, outs.shape[-1]),
            lses=lses.reshape(-1),
            places=jnp.asarray(self.places),
            counts=jnp.asarray(self.counts),
        )


def build_schedule(
    segments: Int[np.ndarray, "C 4"],
    *,
    n_rows: int,
    n_slots: int,
    n_kv_heads: int,
    group: int,
    row_tile: int,
    kv_tile: int,
    n_workers: int,
    diagonals: Int[np.ndarray, "C"] | None = None,
    capacity: Capacity | None = None,
) -> Schedule:
    """Cut the work of ``segments`` into pieces and spread them over the workers.

    Args:
      segments: ``(base, length, first_row, n_rows)``, as for ``segment_attention``.
      n_rows: rows of the batch, ``B``.
      n_slots: slots of the pool, ``N``; a multiple of 8 and at least ``kv_tile``.
      n_kv_heads: ``K``.
      group: query heads of a KV head, ``G``; some fewer than ``row_tile``.
      row_tile: folded rows of a tile.
      kv_tile: keys of a tile.
      n_workers: persistent blocks, the device's multiprocessors.
      diagonals: the last slot that each segment's first row sees; each row after it sees one slot
        more. None for segments that every row sees whole.
      capacity: sizes of the arrays, ``capacity_for``; None rounds what these segments need up to
        powers of two, so that similar batches share a compiled program.

    Returns:
      The schedule, in NumPy.

    Raises:
      ValueError: a group that the row tile does not fit, a pool that the key tile does not fit, or
        segments that need more than ``capacity``.
    """
    if rows_of_tile(row_tile, group) < 1:
        raise ValueError(f"A group of {group} heads does not fit a row tile of {row_tile}.")
    if n_slots < kv_tile or n_slots % ALIGNMENT:
        raise ValueError(
            f"The pool has {n_slots} slots; the kernel needs a multiple of {ALIGNMENT} and at "
            f"least its key tile, {kv_tile}."
        )
    units = _units(np.asarray(segments, np.int64), diagonals, n_rows, group, row_tile)

    def most_pieces(parts: np.ndarray) -> int:
        """Partials of the row that has most, where units are cut into ``parts`` pieces."""
        change = np.zeros(n_rows + 1, np.int64)
        np.add.at(change, units.row, parts)
        np.add.at(change, units.row + units.n_rows, -parts)
        return int(np.cumsum(change).max())

    def fits(parts: np.ndarray) -> bool:
        return capacity is None or (
            int(parts.sum()) * n_kv_heads <= capacity.items
            and most_pieces(parts) <= capacity.pieces
        )

    uncut = np.ones(len(units.row), np.int64)
    if not fits(uncut):
        least = Capacity(len(uncut) * n_kv_heads, most_pieces(uncut))
        raise ValueError(f"The segments need at least {least}, more than {capacity}.")
    cuts = balance(
        -(-(units.end - units.start) // kv_tile),
        n_kv_heads=n_kv_heads,
        n_workers=n_workers,
        fits=fits,
    )
    # Items of a worker in the order of the segments, so that workers read one segment's keys at the
    # same time and its row tiles find them in the cache.
    order = np.argsort(cuts.owner, axis=None, kind="stable")
    item_of = np.empty_like(cuts.owner)
    item_of.ravel()[order] = np.arange(len(order))
    pieces, skipped = _pieces(units, cuts, kv_tile)
    row, place, rank = _partials(units, cuts, skipped, item_of, group, row_tile)
    n_partials = np.bincount(row, minlength=n_rows)
    if capacity is None:
        most = int(n_partials.max(initial=1))
        capacity = Capacity(_power_of_two(len(order)), _power_of_two(most))
    items = np.zeros((capacity.items, FIELDS), np.int32)
    items[: len(order)] = pieces[order // n_kv_heads]
    items[: len(order), HEAD] = order % n_kv_heads
    places = np.full((n_rows, n_kv_heads, capacity.pieces), -1, np.int32)
    places[row, :, rank] = place
    owned = np.bincount(cuts.owner.ravel(), minlength=n_workers)
    return Schedule(
        items=items,
        worker_starts=np.concatenate([[0], np.cumsum(owned)]).astype(np.int32),
        places=places,
        counts=np.repeat(n_partials.astype(np.int32)[:, None], n_kv_heads, axis=1),
        row_tile=row_tile,
        kv_tile=kv_tile,
        causal=diagonals is not None,
    )


def folded_rows(n_rows: int, group: int, row_tile: int) -> int:
    """Folded rows that the kernels read: all, padded to a multiple of 8 and at least one tile."""
    return max(row_tile, -(-n_rows * group // ALIGNMENT) * ALIGNMENT)


def rows_of_tile(row_tile: int, group: int) -> int:
    """Rows that a row tile holds at least, wherever the first lies between two multiples of 8."""
    return (row_tile - ALIGNMENT + math.gcd(group, ALIGNMENT)) // group


def tiles_for(*, folded_rows: int, length: int, n_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """``(row_tile, kv_tile)`` measured best on this process's device, else by rule.

    Args:
      folded_rows: rows of the largest segment, times the group size.
      length: keys of the longest segment.
      n_kv_heads: ``K``.
      head_dim: ``D``.
    """
    shape = {
        "folded_rows": max(1, folded_rows),
        "length": max(1, length),
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
    }
    knobs = tuning.lookup(
        "segment_attention",
        shape,
        exact=("head_dim",),
        fallback={
            "row_tile": 64 if folded_rows <= 64 else 128,
            "kv_tile": 128 if head_dim <= 128 else 64,
        },
    )
    return knobs["row_tile"], knobs["kv_tile"]


def capacity_for(
    *,
    n_rows: int,
    n_kv_heads: int,
    group: int,
    row_tile: int,
    n_workers: int,
    max_segments: int,
    levels: int = 1,
    max_pieces: int = 32,
) -> Capacity:
    """Sizes that hold any ``max_segments`` segments that nest ``levels`` deep at most.

    Those of one level need at most ``ceil(B / R)`` tiles of ``R`` rows, and each segment one more. A
    row's keys are cut into at most ``max_pieces`` pieces; more than 32 pay off on no device measured.
    """
    tiles = levels * -(-n_rows // rows_of_tile(row_tile, group)) + max_segments
    return Capacity(tiles * n_kv_heads + 3 * n_workers, max_pieces)


def has_room(
    capacity: Capacity,
    segments: Int[np.ndarray, "C 4"],
    *,
    n_kv_heads: int,
    group: int,
    row_tile: int,
) -> bool:
    """Whether ``build_schedule`` surely takes segments with that capacity."""
    _, _, first, n = np.asarray(segments, np.int64).reshape(-1, 4).T
    tiles = -(-n // rows_of_tile(row_tile, group))
    change = np.zeros(int((first + n).max(initial=0)) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, first + n, -1)
    deepest = int(np.cumsum(change).max())
    return int(tiles.sum()) * n_kv_heads <= capacity.items and deepest <= capacity.pieces


@dataclasses.dataclass(frozen=True)
class _Units:
    """Row tiles and the slots that they attend to, one element of each ``[U]`` array a unit.

    Attributes:
      folded: first folded row of the tile.
      row: first row of its own.
      n_rows: rows of its own.
      start: first slot of its first key tile.
      begin: first slot that it attends to.
      end: slot after the last that its last row sees.
      seen: last slot that its first row sees; each row after it sees one more, up to ``end``.
    """

    folded: np.ndarray
    row: np.ndarray
    n_rows: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    seen: np.ndarray

    @property
    def start(self) -> np.ndarray:
        return self.begin // ALIGNMENT * ALIGNMENT


def _units(
    segments: np.ndarray, diagonals: np.ndarray | None, n_rows: int, group: int, row_tile: int
) -> _Units:
    last_tile = folded_rows(n_rows, group, row_tile) - row_tile
    tiles = []
    for index, (_, length, first_row, rows) in enumerate(segments.tolist()):
        row, end = first_row, first_row + (rows if length > 0 else 0)
        while row < end:
            folded = min(row * group // ALIGNMENT * ALIGNMENT, last_tile)
            own = min(end - row, (folded + row_tile) // group - row)
            tiles.append((index, folded, row, own))
            row += own
    segment, folded, row, own = np.array(tiles, np.int64).reshape(-1, 4).T
    begin, length, first_row, _ = segments[segment].T
    end = begin + length
    if diagonals is None:
        return _Units(folded, row, own, begin, end, seen=end - 1)
    seen = np.asarray(diagonals, np.int64)[segment] + row - first_row
    end = np.minimum(end, seen + own)
    some = end > begin
    return _Units(*(x[some] for x in (folded, row, own, begin, end, seen)))


def _pieces(units: _Units, cuts: Cuts, kv_tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Items but for the KV head, ``[C, FIELDS]``, and the rows at the front that see none of it."""
    base = units.start[cuts.unit] + cuts.first * kv_tile
    steps = cuts.last - cuts.first
    begin = np.maximum(units.begin[cuts.unit], base)
    end = np.minimum(units.end[cuts.unit], base + steps * kv_tile)
    seen, row = units.seen[cuts.unit], units.row[cuts.unit]
    whole = np.clip((np.minimum(end, seen + 1) - base) // kv_tile, 0, steps)
    masked = np.minimum(steps - whole + (begin > base), steps)
    head = np.zeros_like(base)
    folded = units.folded[cuts.unit]
    fields = np.stack([head, folded, base, steps, masked, begin, end, seen - row], axis=1)
    return fields, np.maximum(begin - seen, 0)


def _partials(
    units: _Units,
    cuts: Cuts,
    skipped: np.ndarray,
    item_of: np.ndarray,
    group: int,
    row_tile: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(row [E], place [E, K], rank [E])``: the partials of each row, ranked by their keys.

    The merge thus adds a row's partials in one order always.
    """
    n_rows = units.n_rows[cuts.unit] - skipped
    cut = np.repeat(np.arange(len(n_rows)), n_rows)
    index = np.arange(len(cut)) - np.repeat(np.cumsum(n_rows) - n_rows, n_rows)
    row = (units.row[cuts.unit] + skipped)[cut] + index
    by_row = np.argsort(row, kind="stable")
    starts = np.cumsum(np.bincount(row)) - np.bincount(row)
    rank = np.empty_like(row)
    rank[by_row] = np.arange(len(row)) - starts[row[by_row]]
    folded = row * group - units.folded[cuts.unit[cut]]
    return row, item_of[cut] * row_tile + folded[:, None], rank


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
