"""The summary of the paper's claims: enters a folder of results, leaves a Markdown table.

A claim without a result is "not run"; one that this set-up cannot decide, or that needs more devices than
any of the results had, says so.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.table_claims import CLAIMS, Rows
from experiments.table_markdown import grid
from kvgrain_jax.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[1]
REPRODUCE = ROOT / "REPRODUCE.md"
BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"


def render(folder: pathlib.Path) -> str:
    """The summary of all claims.

    Args:
      folder: holds a folder with ``result.json`` for each table that was run.
    """
    results = {name: _result(folder / name / "result.json") for name in {c.config for c in CLAIMS}}
    counts = [r["device"]["count"] for r in results.values() if r and "device" in r]
    lines = []
    for claim in CLAIMS:
        result = results[claim.config]
        ours, verdict = "-", "not run"
        if counts and claim.devices > max(counts):
            verdict = f"not testable here: needs {claim.devices} devices"
        rows = Rows(result["rows"] if result else [])
        if found := claim.read(rows):
            ours, confirmed = found
            verdict = "confirmed" if confirmed else "not confirmed"
        elif claim.otherwise and (found := claim.otherwise[0](rows)):
            ours, verdict = found[0], f"not testable here: {claim.otherwise[1]}"
        lines.append([claim.where, claim.says, claim.paper, ours, verdict, f"`{claim.config}`"])
    header = ["paper", "claim", "paper's figure", "ours", "verdict", "config"]
    return "\n".join(grid(header, lines)) + "\n"


def write(text: str, path: pathlib.Path) -> None:
    """Puts the summary into a document, between its two markers.

    Raises:
      ConfigError: the document cannot be read or has no markers.
    """
    try:
        document = path.read_text(encoding="utf-8")
        before, rest = document.split(BEGIN)
        _, after = rest.split(END)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no document with {BEGIN} and {END}: {error}.") from error
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def table_names() -> list[str]:
    """Names of the configs of tables."""
    files = (ROOT / "configs" / "granikv").glob("[!_]*.py")
    return sorted(file.stem for file in files if file.stem != "base")


def _result(path: pathlib.Path) -> Mapping[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"The result {path} cannot be read: {error}.") from error
