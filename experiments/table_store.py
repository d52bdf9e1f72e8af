"""Finished measurements on disk, so that a long run can be interrupted and resumed.

Enters a unit of work and what was measured; leaves one JSON file for it in ``OUT/cells``, written
whole or not at all. A file made under another configuration does not count.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments import report
from experiments.table_spec import Unit


@dataclasses.dataclass(frozen=True)
class Store:
    """The results of one table.

    Attributes:
      folder: where they lie.
    """

    folder: pathlib.Path

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """What was measured for a unit: ``metrics``, ``series``, ``answers``, and on which ``device``
        with which ``versions`` and ``commit``; None where it is not finished."""
        try:
            found = json.loads(self._path(unit).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if found.get("fingerprint") == unit.fingerprint else None

    def write(self, unit: Unit, result: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps what was measured; returns it as ``read`` will."""
        kept = report.plain(
            {
                "unit": unit.name,
                "fingerprint": unit.fingerprint,
                "device": report.device(),
                "versions": report.versions(),
                "commit": report.commit(),
                **result,
            }
        )
        path = self._path(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(
            json.dumps(kept, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        os.replace(unfinished, path)
        return kept

    def _path(self, unit: Unit) -> pathlib.Path:
        return self.folder / "cells" / f"{unit.name}.json"
