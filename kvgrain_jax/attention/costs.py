"""Measured times of the parts of decode attention: enters a device and a head shape, leaves a table.

``attention/costs/DEVICE.json`` holds one entry for each head shape that ``experiments.dispatch_fit``
measured. The ``calibrated`` dispatch rule predicts a step from it.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).with_name("costs")

type Numbers = float | int | np.ndarray


@dataclasses.dataclass(frozen=True)
class Surface:
    """A time measured on a grid of rows and tokens.

    Attributes:
      rows: ascending.
      tokens: ascending.
      microseconds: one tuple for each number of rows.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    microseconds: tuple[tuple[float, ...], ...]

    def __call__(self, rows: Numbers, tokens: Numbers) -> np.ndarray:
        """Times of any numbers of rows and tokens, which broadcast.

        Linear between neighbours in the logarithms of all three; below the grid its edge, above
        it in proportion.
        """
        row_logs, token_logs, logs = self._logs
        row, next_row, of_row, more_rows = _place(row_logs, rows)
        token, next_token, of_token, more_tokens = _place(token_logs, tokens)
        near = logs[row, token] * (1 - of_token) + logs[row, next_token] * of_token
        far = logs[next_row, token] * (1 - of_token) + logs[next_row, next_token] * of_token
        return np.asarray(np.exp(near * (1 - of_row) + far * of_row + more_rows + more_tokens))

    @functools.cached_property
    def _logs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.log(self.rows), np.log(self.tokens), np.log(self.microseconds)


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Times of one layer for one head shape on one device, in microseconds.

    Attributes:
      dense: the prefix pass in wide row tiles, by rows and prefix tokens. ``k`` segments of ``r``
        rows and ``P`` tokens make the same tiles as one of ``r`` rows and ``k * P`` tokens.
      cascade: the same in narrow row tiles.
      own: split-KV decode, by rows and tokens of each row.
    """

    dense: Surface
    cascade: Surface
    own: Surface


def load_costs(
    device: str, *, n_kv_heads: int, group: int, head_dim: int, folder: pathlib.Path = FOLDER
) -> CostTable | None:
    """The table of the head shape nearest to the one asked for; None where none was measured.

    Args:
      device: as ``pallas_kernels.tuning.device_name()`` gives it.
      n_kv_heads: ``K``.
      group: ``G``.
      head_dim: ``D``; a table of another head dim does not serve.
      folder: of the tables.
    """
    asked = {"n_kv_heads": n_kv_heads, "group": group}
    entries = [entry for entry in _entries(folder, device) if entry["head_dim"] == head_dim]
    if not entries:
        return None

    def distance(entry: dict[str, Any]) -> float:
        return sum(abs(math.log2(entry[name] / size)) for name, size in asked.items())

    nearest = min(entries, key=distance)
    return CostTable(*(_surface(nearest[name]) for name in ("dense", "cascade", "own")))


def write_costs(
    device: str, entries: Sequence[dict[str, Any]], folder: pathlib.Path = FOLDER
) -> pathlib.Path:
    """Write the tables of a device; entries of other head shapes that are there stay.

    Args:
      device: its name.
      entries: ``n_kv_heads``, ``group``, ``head_dim``, and for each of ``dense``, ``cascade`` and
        ``own`` a dictionary of the fields of ``Surface``.
      folder: of the tables.
    """
    shape = ("n_kv_heads", "group", "head_dim")
    merged = {
        tuple(entry[name] for name in shape): entry
        for entry in (*_entries(folder, device), *entries)
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device}.json"
    lines = ",\n ".join(json.dumps(entry) for _, entry in sorted(merged.items()))
    path.write_text(f"[\n {lines}\n]\n", encoding="utf-8")
    _entries.cache_clear()
    return path


@functools.cache
def _entries(folder: pathlib.Path, device: str) -> tuple[dict[str, Any], ...]:
    path = folder / f"{device}.json"
    if not path.exists():
        return ()
    return tuple(json.loads(path.read_text(encoding="utf-8")))


def _surface(entry: dict[str, Any]) -> Surface:
    return Surface(
        tuple(entry["rows"]),
        tuple(entry["tokens"]),
        tuple(tuple(line) for line in entry["microseconds"]),
    )


def _place(logs: np.ndarray, values: Numbers) -> tuple[Any, ...]:
    """Where values lie on a grid of logarithms: left and right neighbour, share of the right one, and
    the logarithm of how far they lie above the grid."""
    found = np.log(np.maximum(values, 1.0))
    right = np.clip(np.searchsorted(logs, found), min(1, logs.size - 1), logs.size - 1)
    left = np.maximum(right - 1, 0)
    width = np.where(right > left, logs[right] - logs[left], 1.0)
    share = np.clip((found - logs[left]) / width, 0.0, 1.0)
    return left, right, share, np.maximum(found - logs[-1], 0.0)
