"""Tuned knobs: enters an operation, a device and a shape, leaves the knobs measured best there.

``OP/tuning/DEVICE.json`` holds a list of ``{"shape": {...}, "knobs": {...}}``. The entry whose shape
is nearest, by the sum of absolute differences of log2, is taken; entries that differ in a field
named in ``exact`` are passed over. ``experiments.kernels --tune`` writes these files.
"""

import functools
import json
import math
import pathlib
from typing import Any

import jax


def device_name() -> str:
    """Name of the default device in file names: ``nvidia-h200``, ``cpu``."""
    return jax.local_devices()[0].device_kind.lower().replace(" ", "-").replace("/", "-")


def lookup(
    op: str,
    shape: dict[str, int],
    *,
    exact: tuple[str, ...],
    fallback: dict[str, int],
    device: str | None = None,
) -> dict[str, int]:
    """Knobs of ``op`` for ``shape``, or ``fallback`` where nothing fitting was measured.

    Args:
      op: folder of the operation.
      shape: positive sizes, the fields that the file's shapes have.
      exact: fields that must be equal.
      fallback: what the heuristic says.
      device: ``device_name()``'s form; this process's device where None.
    """
    entries = [
        entry
        for entry in _entries(op, device_name() if device is None else device)
        if all(entry["shape"].get(field) == shape[field] for field in exact)
    ]
    if not entries:
        return fallback

    def distance(entry: dict[str, Any]) -> float:
        return sum(abs(math.log2(entry["shape"][field] / size)) for field, size in shape.items())

    return fallback | min(entries, key=distance)["knobs"]


def write(
    op: str, entries: list[dict[str, Any]], folder: pathlib.Path | None = None
) -> pathlib.Path:
    """Write the tuned knobs of this process's device; returns the file."""
    folder = pathlib.Path(__file__).parent if folder is None else folder
    path = folder / op / "tuning" / f"{device_name()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n ".join(json.dumps(entry) for entry in entries)
    path.write_text(f"[\n {lines}\n]\n", encoding="utf-8")
    _entries.cache_clear()
    return path


@functools.cache
def _entries(op: str, device: str) -> list[dict[str, Any]]:
    path = pathlib.Path(__file__).parent / op / "tuning" / f"{device}.json"
    if not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8"))
