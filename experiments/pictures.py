"""Pictures of what ``serve`` measured.

What enters are the metrics of one workload on several systems; what leaves is a PNG. Systems are
told apart by lightness, hatch and line style as well as by colour, so it can be read in grey.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvgrain_jax.engine.metrics import RunMetrics

# Colour, hatch and line of the systems that the papers compare, and of any others.
SYSTEMS = {
    "uniform16": ("#b8b8b8", "", "-"),
    "cascade16": ("#e08e2b", "///", "--"),
    "kvgrain": ("#0b4f8a", "", "-"),
}
OTHERS = (("#5e8f3a", "...", ":"), ("#8c3b68", "xxx", "-."), ("#6b6b6b", "\\\\", "--"))
BACKENDS = {"paged": "#c9c9c9", "cascade": "#e08e2b", "cascade16": "#e9b877", "dense": "#0b4f8a"}
BACKEND_HATCHES = {"paged": "", "cascade": "///", "cascade16": "\\\\\\", "dense": ""}


def draw_runs(path: pathlib.Path, title: str, runs: Mapping[str, RunMetrics]) -> None:
    """Draws the systems side by side: throughput, prefix traffic, latencies, pools, backends.

    Args:
      path: the PNG to write.
      title: what was run.
      runs: metrics of each system, by name.
    """
    figure = Figure(figsize=(12.5, 7.6), layout="constrained")
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    axes = figure.subplots(2, 3)
    others = itertools.cycle(OTHERS)
    styles = {
        name: dict(zip(("color", "hatch", "line"), SYSTEMS.get(name) or next(others), strict=True))
        for name in runs
    }
    _throughput(axes[0, 0], runs, styles)
    _prefix_traffic(axes[1, 0], runs, styles)
    ttft = {name: [r.ttft for r in run.requests] for name, run in runs.items()}
    tpot = {name: [r.tpot * 1000 for r in run.requests] for name, run in runs.items()}
    _distribution(axes[0, 1], ttft, styles, "Time to first token", "s")
    _distribution(axes[1, 1], tpot, styles, "Time per output token", "ms")
    _occupancy(axes[0, 2], runs, styles)
    _backends(axes[1, 2], runs)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    figure.savefig(path, dpi=150)


def stack_bars(
    axis: Axes,
    parts: Sequence[tuple[tuple[str, str, str], Sequence[float]]],
    totals: Sequence[str],
) -> None:
    """Draws bars of parts one on the other.

    Args:
      axis: where.
      parts: colour, hatch and name of each part, and its height in each bar.
      totals: what stands over each bar.
    """
    floor = np.zeros(len(totals))
    for (colour, hatch, name), heights in parts:
        axis.bar(
            range(len(totals)),
            heights,
            0.7,
            floor,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            label=name,
        )
        floor += heights
    for place, (top, text) in enumerate(zip(floor, totals, strict=True)):
        axis.annotate(
            text, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=8
        )


def _throughput(axis: Axes, runs: Mapping[str, RunMetrics], styles: Mapping) -> None:
    values = [run.summary()["output_tokens_per_s"] for run in runs.values()]
    for index, (name, value) in enumerate(zip(runs, values, strict=True)):
        style = styles[name]
        axis.bar(index, value, 0.62, color=style["color"], hatch=style["hatch"], edgecolor="white")
        axis.annotate(
            f"{value:.3g}", (index, value), (0, 2), textcoords="offset points", ha="center"
        )
    axis.set_xticks(range(len(runs)), list(runs))
    axis.set_ylabel("tokens/s")
    axis.set_ylim(0, max([*values, 1e-9]) * 1.15)
    axis.set_title("Output throughput", fontsize=11, loc="left")


def _prefix_traffic(axis: Axes, runs: Mapping[str, RunMetrics], styles: Mapping) -> None:
    keys = {"prefix_bytes_stored": "stored (peak)", "prefix_bytes_read_per_step": "read per step"}
    width = 0.8 / len(runs)
    top = 1e-9
    for index, (name, run) in enumerate(runs.items()):
        style, summary = styles[name], run.summary()
        heights = [summary[key] / 2**20 for key in keys]
        places = np.arange(len(keys)) + (index - (len(runs) - 1) / 2) * width
        axis.bar(
            places,
            heights,
            width,
            label=name,
            color=style["color"],
            hatch=style["hatch"],
            edgecolor="white",
        )
        for place, height in zip(places, heights, strict=True):
            axis.annotate(
                f"{height:.3g}",
                (place, height),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        top = max(top, *heights)
    axis.set_xticks(range(len(keys)), list(keys.values()))
    axis.set_ylabel("MiB")
    axis.set_ylim(0, top * 1.35)
    axis.set_title("Keys and values of shared prefixes", fontsize=11, loc="left")
    axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=len(runs))


def _distribution(
    axis: Axes, values: Mapping[str, list[float]], styles: Mapping, title: str, unit: str
) -> None:
    for name, found in values.items():
        finite = np.sort([v for v in found if np.isfinite(v)])
        if not finite.size:
            continue
        share = np.arange(1, finite.size + 1) / finite.size
        axis.step(
            np.concatenate([finite[:1], finite]),
            np.concatenate([[0.0], share]),
            where="post",
            label=name,
            color=styles[name]["color"],
            linestyle=styles[name]["line"],
            linewidth=2,
        )
    axis.set_xlabel(unit)
    axis.set_ylabel("share of requests")
    axis.set_ylim(0, 1.02)
    axis.set_xlim(left=0)
    axis.set_title(title, fontsize=11, loc="left")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False, loc="best")


def _occupancy(axis: Axes, runs: Mapping[str, RunMetrics], styles: Mapping) -> None:
    """HOT and COLD of the systems that have HOT, stacked; the total of the others as lines."""
    for name, run in runs.items():
        time = [sample.time for sample in run.samples]
        cold = np.array([sample.cold_tokens for sample in run.samples])
        hot = np.array([sample.hot_tokens for sample in run.samples])
        if not time:
            continue
        if hot.any():
            colour = styles[name]["color"]
            axis.stackplot(
                time,
                hot,
                cold,
                labels=[f"{name}, HOT", f"{name}, COLD"],
                colors=[colour, colour],
                edgecolor="white",
                step="post",
            )
            axis.collections[-1].set_alpha(0.35)
        else:
            axis.step(
                time,
                hot + cold,
                where="post",
                label=f"{name}, all",
                color=styles[name]["color"],
                linestyle=styles[name]["line"],
                linewidth=2,
            )
    axis.set_xlabel("time, s")
    axis.set_ylabel("tokens in use")
    axis.set_ylim(0, axis.get_ylim()[1] * 1.3)
    axis.set_xlim(left=0)
    axis.set_title("Pools over time", fontsize=11, loc="left")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)


def _backends(axis: Axes, runs: Mapping[str, RunMetrics]) -> None:
    """One strip for each system: which backend each decode step took."""
    drawn: set[str] = set()
    names = list(runs)[::-1]
    for place, run in enumerate(runs[name] for name in names):
        start = 0
        for backend, group in itertools.groupby(step.backend for step in run.steps):
            length = sum(1 for _ in group)
            axis.broken_barh(
                [(start, length)],
                (place - 0.35, 0.7),
                facecolor=BACKENDS.get(backend, "#5e8f3a"),
                hatch=BACKEND_HATCHES.get(backend, "..."),
                edgecolor="white",
                linewidth=0,
                label=None if backend in drawn else backend,
            )
            drawn.add(backend)
            start += length
    axis.set_yticks(range(len(runs)), names)
    axis.set_ylim(-0.6, len(runs) + 0.2)
    axis.set_xlabel("decode step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title("Backend of each step", fontsize=11, loc="left")
    if drawn:
        axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
