"""Roofline of measured kernels: enters rows of ``experiments.kernels``, leaves a PNG."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.kernel_timing import Ceilings


def roofline(rows: Sequence[Mapping[str, Any]], ceilings: Ceilings, path: pathlib.Path) -> None:
    """Draw each row at its arithmetic intensity and rate, under what the device reached."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidth = max(ceilings.copy, ceilings.read)
    intensity = np.logspace(0, 3.8, 200)
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    roof = np.minimum(intensity * bandwidth, ceilings.matmul) / 1e12
    axes.loglog(intensity, roof, color="black", linewidth=1.5, label="measured ceilings")
    names = sorted({row["implementation"] for row in rows})
    for name in names:
        own = [row for row in rows if row["implementation"] == name and row["tflops"] > 0]
        x = [row["tflops"] / row["tb_s"] for row in own]
        axes.scatter(x, [row["tflops"] for row in own], s=28, label=name, zorder=3)
        if name == "xla":
            continue
        for row, at in zip(own, x, strict=True):
            axes.annotate(
                row["case"],
                (at, row["tflops"]),
                xytext=(6, -2),
                textcoords="offset points",
                fontsize=5,
                alpha=0.8,
            )
    axes.set_xlabel("FLOP per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.grid(which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
