"""What a binary leaves behind: ``result.json`` and tables on the terminal.

``result.json`` holds ``experiment``, ``config``, ``device``, ``versions``, ``commit`` and ``rows``
(one for each system or cell), and what a binary adds. It is valid JSON (a number that is not finite
is ``null``) and appears whole or not at all.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.box
import rich.table

from kvgrain_jax.errors import ConfigError

PACKAGES = ("kvgrain-jax", "jax", "jaxlib", "flax", "numpy")


def check_out_folder(path: str | pathlib.Path) -> pathlib.Path:
    """Makes the output folder where it is missing, and tries to write into it.

    Raises:
      ConfigError: it cannot be made or written.
    """
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"The output folder {folder} cannot be written: {reason}.") from error
    return folder


def write_result(
    folder: pathlib.Path,
    experiment: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> pathlib.Path:
    """Writes ``result.json``.

    Args:
      folder: where to.
      experiment: name of the binary.
      config: what it ran with.
      rows: what it measured.
      **more: further entries.

    Returns:
      Path of the file.
    """
    result = {
        "experiment": experiment,
        "config": config,
        "device": device(),
        "versions": versions(),
        "commit": commit(),
        "rows": rows,
        **more,
    }
    path = folder / "result.json"
    text = json.dumps(plain(result), indent=1, allow_nan=False, ensure_ascii=False)
    # A reader, or a run that is killed meanwhile, never sees half a file.
    unfinished = path.with_suffix(".json.unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path


def plain(value: Any) -> Any:
    """``value`` in the types that JSON has; a number that is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def device() -> dict[str, Any]:
    """The device that JAX computes on by default."""
    first = jax.devices()[0]
    kind = _processor() if first.platform == "cpu" else first.device_kind
    return {
        "platform": first.platform,
        "kind": kind,
        "count": jax.device_count(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide over the figures."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit of the checkout, with ``-dirty`` where files differ; None outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> rich.table.Table:
    """A table for the terminal: the first column names the row, the others are right-aligned."""
    result = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*row)
    return result


def milliseconds(seconds: float) -> str:
    """A time, in ms with three figures; a dash where there is none."""
    if not math.isfinite(seconds):
        return "-"
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def mebibytes(size: float) -> str:
    """A size in MiB with one decimal; a dash where there is none."""
    return f"{size / 2**20:.1f}" if math.isfinite(size) else "-"


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
