"""Picture of a decode grid: enters the rows of results, leaves a PNG.

python -m experiments.decode_grid_picture RESULT.json [RESULT.json ...] OUT.png
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

STYLES = {
    "auto": ("black", "o"),
    "dense": ("tab:blue", "s"),
    "cascade": ("tab:orange", "^"),
    "paged": ("tab:red", "v"),
    "roofline": ("gray", "|"),
    "peer": ("tab:green", "x"),
}


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path, title: str) -> pathlib.Path:
    """Draws a line for each cell, with a mark for each backend, the roofline and the peer.

    Args:
      rows: as ``decode_grid`` returns them.
      path: of the PNG.
      title: over the picture.
    """
    order = sorted(rows, key=lambda row: (-row["batch"], -sum(row["prefixes"])))
    cells = list(dict.fromkeys(row["cell"] for row in order))
    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.3 * len(cells)), layout="constrained")
    marks: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        place = cells.index(row["cell"])
        marks.setdefault(row["backend"], []).append((row["step_ms"], place))
        for name, field in (("roofline", "roofline_ms"), ("peer", "peer_ms")):
            if row.get(field):
                marks.setdefault(name, []).append((row[field], place))
    for name, points in marks.items():
        color, marker = STYLES.get(name, ("tab:purple", "d"))
        xs, ys = zip(*points, strict=True)
        size = 160 if marker == "|" else 36
        axis.scatter(xs, ys, s=size, color=color, marker=marker, label=name, zorder=3)
    axis.set_yticks(range(len(cells)), cells)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="x", which="minor", labelsize=7)
    axis.set_xlabel("one decode step, ms")
    axis.grid(alpha=0.3, which="both", axis="x")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=8)
    axis.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main(paths: Sequence[str]) -> None:
    """Draws the rows of several results; of a cell that comes twice the later ones count."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    title = ""
    for path in paths[:-1]:
        result = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        title = f"{result['config']['model']}, {result['device']['kind']}"
        cells |= {(row["cell"], row["backend"]): row for row in result["rows"]}
    draw(list(cells.values()), pathlib.Path(paths[-1]), title)


if __name__ == "__main__":
    main(sys.argv[1:])
