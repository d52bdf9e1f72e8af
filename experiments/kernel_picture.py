"""Roofline of measured kernels: enters rows of ``experiments.kernels``, leaves a PNG."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.kernel_timing import Ceilings

MARKERS = "osD^vP*X"
LINE_POINTS = 9  # height of a label


def roofline(rows: Sequence[Mapping[str, Any]], ceilings: Ceilings, path: pathlib.Path) -> None:
    """Draw each row at its arithmetic intensity and rate, under what the device reached.

    The fastest implementation of a case bears its name, the others are fainter.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidth = max(ceilings.copy, ceilings.read)
    intensity = np.logspace(0, 3.8, 200)
    figure, axes = pyplot.subplots(figsize=(12, 7), layout="constrained")
    roof = np.minimum(intensity * bandwidth, ceilings.matmul) / 1e12
    axes.loglog(intensity, roof, color="black", linewidth=1.5, label="measured ceilings")
    drawn = [row for row in rows if row["tflops"] > 0]
    best = list({r["case"]: r for r in sorted(drawn, key=lambda r: r["tflops"])}.values())
    for marker, name in zip(
        MARKERS, sorted({row["implementation"] for row in drawn}), strict=False
    ):
        own = [row for row in drawn if row["implementation"] == name]
        first, *_ = axes.plot([], [], marker, label=name)
        for row in own:
            axes.plot(
                row["tflops"] / row["tb_s"],
                row["tflops"],
                marker,
                color=first.get_color(),
                alpha=1.0 if row in best else 0.3,
                zorder=3,
            )
    axes.set_xlim(1, 2e4)
    axes.set_xlabel("FLOP per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.grid(which="both", alpha=0.2)
    axes.legend(loc="upper left")
    axes.set_title("Kernels under the rates that the same run reached")
    _label(figure, axes, best)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _label(figure, axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Name the points to their right; names of points above each other are pushed apart."""
    figure.canvas.draw()
    to_points = 72 / figure.dpi

    def place(row):
        return axes.transData.transform((row["tflops"] / row["tb_s"], row["tflops"])) * to_points

    columns: list[list[Mapping[str, Any]]] = []
    for row in sorted(rows, key=lambda row: row["tflops"] / row["tb_s"]):
        near = columns and place(row)[0] - place(columns[-1][0])[0] < 160
        columns[-1].append(row) if near else columns.append([row])
    for column in columns:
        floor = -np.inf
        right = max(place(row)[0] for row in column)
        for row in sorted(column, key=lambda row: row["tflops"]):
            x, y = place(row)
            floor = max(y, floor + LINE_POINTS)
            axes.annotate(
                row["case"],
                (row["tflops"] / row["tb_s"], row["tflops"]),
                xytext=(right - x + 12, floor - y - 2),
                textcoords="offset points",
                fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                zorder=4,
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "alpha": 0.5},
            )
