"""Work of the GPU kernels of segment attention: enters segments, leaves a schedule. Plan time, NumPy.

A *unit* is one row tile of one segment for one KV head. Its keys are cut into *pieces*, so that
the pieces fill the workers (persistent blocks) evenly whatever the segments' lengths and row
counts. Each piece leaves one partial result; ``pieces`` says which partials make up a row.
"""

import dataclasses
import heapq

import jax
import numpy as np
from jaxtyping import Int

from pallas_kernels import tuning

KV_ALIGNMENT = 8  # a TMA tile with swizzle starts at a multiple of 8 rows
PIECE_COST = 1.0  # start and epilogue of a piece, in key tiles
HEAD, TILE, BASE, STEPS, MASKED, KV_BEGIN, KV_END, FIELDS = range(8)

type Ints = Int[np.ndarray, "..."] | Int[jax.Array, "..."]


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Array sizes of a schedule, fixed so that a new plan never recompiles the program it enters.

    Attributes:
      tiles: row tiles, ``T``.
      items: pieces of all workers, ``I``.
      pieces: partials of a row, ``S``.
    """

    tiles: int
    items: int
    pieces: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which worker computes which piece, and where the partials of each row are.

    Attributes:
      tile_rows: ``[T, R]`` int32, the batch row of each row of each row tile; 0 in the padding.
      items: ``[I, 7]`` int32, one piece each: KV head, row tile, first slot of the first key tile
        (a multiple of 8), number of key tiles, how many of them hold slots outside the range, and
        the range of slots ``[begin, end)``. Item ``i`` writes partial ``i``.
      worker_starts: ``[W + 1]`` int32, worker ``w`` computes the items
        ``[worker_starts[w], worker_starts[w + 1])``.
      pieces: ``[B, K, S]`` int32, for each row and KV head its partials, as
        ``item · row_tile + first folded row``; -1 where there are fewer than ``S``.
      counts: ``[B, K]`` int32, how many partials each row and KV head has.
      row_tile: folded rows (row, head of the group) of a tile; ``R = row_tile // G`` rows.
      kv_tile: keys of a tile.
    """

    tile_rows: Ints
    items: Ints
    worker_starts: Ints
    pieces: Ints
    counts: Ints
    row_tile: int = dataclasses.field(metadata={"static": True})
    kv_tile: int = dataclasses.field(metadata={"static": True})


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
    capacity: Capacity | None = None,
) -> Schedule:
    """Cut the work of ``segments`` into pieces and spread them over the workers.

    Args:
      segments: ``(base, length, first_row, n_rows)``, as for ``segment_attention``.
      n_rows: rows of the batch, ``B``.
      n_slots: slots of the pool, ``N``; a multiple of 8 and at least ``kv_tile``.
      n_kv_heads: ``K``.
      group: query heads of a KV head, ``G``; at most ``row_tile``.
      row_tile: folded rows of a tile.
      kv_tile: keys of a tile.
      n_workers: persistent blocks, the device's multiprocessors.
      capacity: sizes of the arrays, ``capacity_for``; None rounds what these segments need up to
        powers of two, so that similar batches share a compiled program.

    Returns:
      The schedule, in NumPy.

    Raises:
      ValueError: a group larger than the row tile, a pool that the key tile does not fit, or
        segments that need more than ``capacity``.
    """
    if group > row_tile:
        raise ValueError(f"A group of {group} heads does not fit a row tile of {row_tile}.")
    if n_slots < kv_tile or n_slots % KV_ALIGNMENT:
        raise ValueError(
            f"The pool has {n_slots} slots; the kernel needs a multiple of {KV_ALIGNMENT} and at "
            f"least its key tile, {kv_tile}."
        )
    rows_per_tile = row_tile // group
    units = [
        _Unit(first_row + offset, min(rows_per_tile, rows - offset), base, base + length)
        for base, length, first_row, rows in np.asarray(segments).tolist()
        for offset in range(0, rows if length > 0 else 0, rows_per_tile)
    ]
    n_tiles = np.array([unit.tiles(kv_tile) for unit in units], np.int64)
    depth = np.zeros(n_rows, np.int64)
    for unit in units:
        depth[unit.first_row : unit.first_row + unit.n_rows] += 1
    least = Capacity(len(units), len(units) * n_kv_heads, int(depth.max(initial=0)))
    if capacity is not None and any(
        getattr(least, field.name) > getattr(capacity, field.name)
        for field in dataclasses.fields(Capacity)
    ):
        raise ValueError(f"The segments need at least {least}, more than {capacity}.")
    owned = _balance(n_tiles, units, n_rows, n_kv_heads, n_workers, capacity)
    cuts = [cut for cuts in owned for cut in cuts]
    pieces, counts = _partials_of_rows(cuts, units, n_rows, n_kv_heads, group, row_tile)
    if capacity is None:
        sizes = len(units), len(cuts), int(counts.max(initial=1))
        capacity = Capacity(*(_power_of_two(n) for n in sizes))

    tile_rows = np.zeros((capacity.tiles, rows_per_tile), np.int32)
    for index, unit in enumerate(units):
        tile_rows[index, : unit.n_rows] = np.arange(unit.first_row, unit.first_row + unit.n_rows)
    items = np.zeros((capacity.items, FIELDS), np.int32)
    for item, (unit, head, first, last) in enumerate(cuts):
        items[item] = (head, unit, *units[unit].piece(first, last, kv_tile))
    starts = np.cumsum([0, *(len(cuts) for cuts in owned)])
    return Schedule(
        tile_rows=tile_rows,
        items=items,
        worker_starts=starts.astype(np.int32),
        pieces=_widen(pieces, capacity.pieces),
        counts=counts,
        row_tile=row_tile,
        kv_tile=kv_tile,
    )


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
    *, n_rows: int, n_kv_heads: int, group: int, row_tile: int, n_workers: int, max_segments: int
) -> Capacity:
    """Sizes that hold any ``max_segments`` segments that do not nest, and most that do.

    Unnested segments need at most ``ceil(B / R) + max_segments`` row tiles. A row's keys are cut
    into at most 32 pieces, more than pay off on any device measured.
    """
    tiles = -(-n_rows // (row_tile // group)) + max_segments
    return Capacity(tiles, tiles * n_kv_heads + 3 * n_workers, 32)


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A run of rows and the slots ``[begin, end)`` that they attend to."""

    first_row: int
    n_rows: int
    begin: int
    end: int

    def start(self) -> int:
        return self.begin // KV_ALIGNMENT * KV_ALIGNMENT

    def tiles(self, kv_tile: int) -> int:
        return -(-(self.end - self.start()) // kv_tile)

    def piece(self, first: int, last: int, kv_tile: int) -> tuple[int, ...]:
        """Fields ``BASE`` to ``KV_END`` of the key tiles ``[first, last)``.

        The kernel takes the last tile first, then the others in order, so that the tiles that
        hold slots outside the range come first.
        """
        base, stop = self.start() + first * kv_tile, self.start() + last * kv_tile
        begin, end = max(self.begin, base), min(self.end, stop)
        masked = 2 if base < begin else int(end < stop)
        return base, last - first, min(masked, last - first), begin, end


type _Cut = tuple[int, int, int, int]  # unit, head, first tile, last tile


def _balance(
    n_tiles: np.ndarray,
    units: list[_Unit],
    n_rows: int,
    n_kv_heads: int,
    n_workers: int,
    capacity: Capacity | None,
) -> list[list[_Cut]]:
    """Pieces of each worker: of the lengths tried, that with the shortest longest worker."""
    total = int(n_tiles.sum()) * n_kv_heads
    if total == 0:
        return [[] for _ in range(n_workers)]
    share = total / n_workers
    lengths = {max(1, int(np.ceil(share * part))) for part in (0.34, 0.5, 0.67, 0.8, 1, 1.1, 1.25)}
    lengths |= {-(-int(n) // s) for n in set(n_tiles.tolist()) for s in range(1, 33)}
    best = None
    for length in sorted(lengths, reverse=True):
        splits = -(-n_tiles // length)
        if best is not None and (
            length < share / 3 or not _fits(splits, units, n_rows, n_kv_heads, capacity)
        ):
            continue
        cuts = [
            (unit, head, n * i // parts, n * (i + 1) // parts)
            for unit, (n, parts) in enumerate(zip(n_tiles.tolist(), splits.tolist(), strict=True))
            for head in range(n_kv_heads)
            for i in range(parts)
        ]
        loads = [(0.0, worker) for worker in range(n_workers)]
        owned: list[list[_Cut]] = [[] for _ in range(n_workers)]
        for cut in sorted(cuts, key=lambda cut: cut[2] - cut[3]):
            load, worker = heapq.heappop(loads)
            owned[worker].append(cut)
            heapq.heappush(loads, (load + cut[3] - cut[2] + PIECE_COST, worker))
        longest = max(loads)[0]
        if best is None or longest < best[0]:
            best = (longest, owned)
    assert best is not None
    # In the order of the segments, so that workers read one segment's keys at the same time and its
    # row tiles find them in the cache.
    return [sorted(cuts) for cuts in best[1]]


def _fits(splits, units, n_rows, n_kv_heads, capacity) -> bool:
    """Whether the partials of units cut into ``splits`` pieces have room."""
    if capacity is None:
        return True
    of_row = np.zeros(n_rows, np.int64)
    for unit, parts in zip(units, splits.tolist(), strict=True):
        of_row[unit.first_row : unit.first_row + unit.n_rows] += parts
    n_items = int(splits.sum()) * n_kv_heads
    return int(of_row.max()) <= capacity.pieces and n_items <= capacity.items


def _partials_of_rows(cuts, units, n_rows, n_kv_heads, group, row_tile):
    """``(pieces, counts)`` of ``Schedule``, the first as wide as the row with most partials."""
    counts = np.zeros((n_rows, n_kv_heads), np.int32)
    places = []
    # In the order of the keys, so that the merge adds a row's partials in one order always.
    for item, (unit, head, _, _) in sorted(enumerate(cuts), key=lambda entry: entry[1]):
        for row in range(units[unit].n_rows):
            place = (units[unit].first_row + row, head)
            places.append((*place, counts[place], item * row_tile + row * group))
            counts[place] += 1
    pieces = np.full((n_rows, n_kv_heads, int(counts.max(initial=1))), -1, np.int32)
    if places:
        row, head, column, value = np.array(places).T
        pieces[row, head, column] = value
    return pieces, counts


def _widen(pieces: np.ndarray, width: int) -> np.ndarray:
    return np.pad(pieces, ((0, 0), (0, 0), (0, width - pieces.shape[2])), constant_values=-1)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
