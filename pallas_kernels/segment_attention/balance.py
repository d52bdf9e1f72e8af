"""Balance of a schedule: enters the key tiles of each row tile, leaves cuts and their workers.

All KV heads have the same work, so a row tile is cut the same way for each of them.
"""

import dataclasses
import heapq
from collections.abc import Callable

import numpy as np

PIECE_COST = 1.0  # start and epilogue of a piece, in key tiles
TRIALS = 4  # assignments tried


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Row tiles whose keys are cut into pieces, in the order of row tiles and keys.

    Attributes:
      unit: ``[C]``, the row tile of each piece.
      first: ``[C]``, its first key tile.
      last: ``[C]``, the key tile after its last.
      owner: ``[C, K]``, the worker of the piece of each KV head.
    """

    unit: np.ndarray
    first: np.ndarray
    last: np.ndarray
    owner: np.ndarray


def balance(
    n_tiles: np.ndarray,
    *,
    n_kv_heads: int,
    n_workers: int,
    fits: Callable[[np.ndarray], bool],
) -> Cuts:
    """Cut and assign so that the worker with most to do has little more than the others.

    Args:
      n_tiles: ``[U]``, key tiles of each row tile, positive.
      n_kv_heads: ``K``.
      n_workers: workers to spread over.
      fits: whether row tiles cut into so many pieces each, ``[U]``, have room in the schedule.
        Uncut ones do.
    """
    if len(n_tiles) == 0:
        none = np.zeros(0, np.int64)
        return Cuts(none, none, none, np.zeros((0, n_kv_heads), np.int64))
    trials = {}
    for length in _lengths(n_tiles, n_kv_heads, n_workers):
        parts = -(-n_tiles // length)
        trials[parts.tobytes()] = (_bound(n_tiles, parts, n_kv_heads, n_workers), parts)
    best, done = None, 0
    for bound, parts in sorted(trials.values(), key=lambda trial: (trial[0], trial[1].sum())):
        if best is not None and (bound >= best[0] or done == TRIALS):
            break
        if parts.max() > 1 and not fits(parts):
            continue
        unit, first, last = _cut(n_tiles, parts)
        longest, owner = _assign(last - first + PIECE_COST, n_kv_heads, n_workers)
        done += 1
        if best is None or longest < best[0]:
            best = longest, Cuts(unit, first, last, owner)
    assert best is not None  # uncut row tiles are among the trials
    return best[1]


def _lengths(n_tiles: np.ndarray, n_kv_heads: int, n_workers: int) -> set[int]:
    """Longest pieces to try, in key tiles: parts of a worker's share and of the longest units."""
    share = float(n_tiles.sum()) * n_kv_heads / n_workers
    lengths = {int(np.ceil(share * part)) for part in (0.34, 0.5, 0.67, 0.8, 1, 1.1, 1.25)}
    lengths |= {-(-n // s) for n in np.unique(n_tiles)[-4:].tolist() for s in range(1, 33)}
    longest = int(n_tiles.max())
    return {length for length in lengths if max(1.0, share / 3) <= length < longest} | {longest}


def _cut(n_tiles: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(unit, first, last)`` of the pieces of units cut into ``parts`` nearly equal ones."""
    unit = np.repeat(np.arange(len(parts)), parts)
    index = np.arange(len(unit)) - np.repeat(np.cumsum(parts) - parts, parts)
    n, of = n_tiles[unit], parts[unit]
    return unit, n * index // of, n * (index + 1) // of


def _bound(n_tiles: np.ndarray, parts: np.ndarray, n_kv_heads: int, n_workers: int) -> float:
    """What some worker has to do at least: its share, or ``j + 1`` of the ``j · W + 1`` longest."""
    _, first, last = _cut(n_tiles, parts)
    costs = np.sort(last - first)[::-1] + PIECE_COST
    turns = np.arange(0, len(costs) * n_kv_heads, n_workers)
    crowded = costs[turns // n_kv_heads] * np.arange(1, len(turns) + 1)
    return max(float(crowded.max()), float(costs.sum()) * n_kv_heads / n_workers)


def _assign(costs: np.ndarray, n_kv_heads: int, n_workers: int) -> tuple[float, np.ndarray]:
    """Longest first, each to the worker with least to do: ``(longest load, owner [C, K])``."""
    loads = [(0.0, worker) for worker in range(n_workers)]
    order = np.argsort(-costs, kind="stable")
    taken = []
    for cost in costs[order].tolist():
        for _ in range(n_kv_heads):
            load, worker = loads[0]
            heapq.heapreplace(loads, (load + cost, worker))
            taken.append(worker)
    owner = np.empty((len(costs), n_kv_heads), np.int64)
    owner[order] = np.array(taken).reshape(-1, n_kv_heads)
    return max(loads)[0], owner
