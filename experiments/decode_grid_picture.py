"""Picture of a decode grid: enters the rows of a result, leaves a PNG."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

STYLES = {
    "auto": ("black", "o", "-"),
    "dense": ("tab:blue", "s", "--"),
    "cascade": ("tab:orange", "^", "--"),
    "paged": ("tab:red", "v", ":"),
    "roofline": ("gray", "", "-."),
    "peer": ("tab:green", "x", "-"),
}


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path, title: str) -> pathlib.Path:
    """Draws milliseconds a step against the prefix, one panel for each batch size.

    Args:
      rows: as ``decode_grid`` returns them.
      path: of the PNG.
      title: over the picture.
    """
    batches = sorted({row["batch"] for row in rows})
    figure, axes = plt.subplots(
        1,
        len(batches),
        figsize=(max(4.5, 3.2 * len(batches)), 3.6),
        squeeze=False,
        layout="constrained",
    )
    for axis, batch in zip(axes[0], batches, strict=True):
        here = [row for row in rows if row["batch"] == batch]
        lines: dict[str, dict[int, float]] = {}
        for row in here:
            tokens = sum(row["prefixes"])
            lines.setdefault(row["backend"], {})[tokens] = row["step_ms"]
            if "roofline_ms" in row:
                lines.setdefault("roofline", {})[tokens] = row["roofline_ms"]
            if row["peer_ms"]:
                lines.setdefault("peer", {})[tokens] = row["peer_ms"]
        for name, points in lines.items():
            color, marker, style = STYLES.get(name, ("tab:purple", "d", "--"))
            xs = sorted(points)
            axis.plot(
                [max(x, 64) for x in xs],  # no prefix is drawn at the left edge
                [points[x] for x in xs],
                color=color,
                marker=marker,
                linestyle=style,
                label=name,
                markersize=5,
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"B = {batch}")
        axis.set_xlabel("prefix tokens")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("one decode step, ms")
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
