"""Pictures of tables: enters rows and what was recorded for pictures, leaves a PNG.

Variants are told apart by lightness, line, marker and hatch as well as by colour, so a picture can be
read in grey. What the paper printed is hollow.
"""

import itertools
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from experiments.pictures import OTHERS, SYSTEMS
from experiments.table_markdown import label, value_text
from experiments.table_rows import METRICS, Row, mean

MARKERS = {"uniform16": "s", "cascade16": "^", "kvgrain": "o"}
# Of these the paper's numbers are drawn too; its absolute ones are of another GPU.
DIMENSIONLESS = ("speedup", "to_cascade", "dense_percent")
OTHER_MARKERS = ("D", "v", "P", "X", "*", "<")

type Series = Mapping[str, Mapping[str, Any]]


def draw(
    path: pathlib.Path, config: Mapping[str, Any], rows: Sequence[Row], series: Series
) -> None:
    """Draws a table.

    Args:
      path: the PNG to write.
      config: the checked config; ``picture`` is one of ``PICTURES``.
      rows: see ``experiments.table_rows``.
      series: of each variant what the last served cell recorded for pictures.
    """
    measured = [row for row in rows if row["metrics"]]
    panels = PICTURES[config["picture"]]
    n_rows = 1 if len(panels) < 4 else 2
    n_columns = -(-len(panels) // n_rows)
    figure = Figure(figsize=(max(8, 5.6 * n_columns), 4.4 * n_rows), layout="constrained")
    figure.suptitle(config["title"], fontsize=12, x=0.01, ha="left")
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flat
    styles = _styles([variant["name"] for variant in config["variants"]])
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis, config, measured, series, styles)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
        if not axis.has_data():
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")
        elif axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False, loc="best")
    figure.savefig(path, dpi=120)


def _styles(variants: Sequence[str]) -> dict[str, dict[str, Any]]:
    others, markers = itertools.cycle(OTHERS), itertools.cycle(OTHER_MARKERS)
    styles = {}
    for name in variants:
        color, hatch, line = SYSTEMS.get(name) or next(others)
        marker = MARKERS.get(name) or next(markers)
        styles[name] = {"color": color, "hatch": hatch, "line": line, "marker": marker}
    return styles


def _ladder(x: str, metric: str, *, log: bool = True) -> Callable[..., None]:
    """A metric over a numeric key ``x``, one line a variant; of other keys the largest values."""

    def panel(axis: Axes, config: Mapping[str, Any], rows, series, styles) -> None:
        others = [key for key in config["axes"] if key != x]
        top = {key: max(row["cell"][key] for row in rows) for key in others} if rows else {}
        chosen = [row for row in rows if all(row["cell"][k] == v for k, v in top.items())]
        hows = list(dict.fromkeys(row["how"] for row in chosen))
        for (name, style), how in itertools.product(styles.items(), hows):
            own = [r for r in chosen if r["variant"] == name and r["how"] == how]
            first = how == hows[0]
            look = {"color": style["color"], "marker": style["marker"]}
            ours = [(r["cell"][x], mean(r, metric)) for r in own if mean(r, metric) is not None]
            paper = [(r["cell"][x], r["paper"][metric]) for r in own if metric in r["paper"]]
            if ours:
                axis.plot(
                    *zip(*sorted(ours), strict=True),
                    style["line"],
                    label=name if first else f"{name}, {how}",
                    linewidth=2 if first else 0.8,
                    markersize=7 if first else 3,
                    **look,
                )
            if paper and first and name != config["reference"] and metric in DIMENSIONLESS:
                axis.plot(
                    *zip(*sorted(paper), strict=True),
                    ":",
                    label=f"{name}, paper (A100)",
                    markerfacecolor="white",
                    **look,
                )
        ticks = sorted({row["cell"][x] for row in chosen})
        if log and ticks and min(ticks) > 0:
            axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [value_text(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel(X_LABELS.get(x, x))
        axis.set_ylabel(METRICS[metric][0].format(reference=config["reference"]))
        if metric in ("speedup", "to_cascade"):
            axis.axhline(1, color="black", linewidth=0.6)
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.set_title(f"at {label(top)}" if top else "", fontsize=10, loc="left")

    return panel


def _bars(metric: str) -> Callable[..., None]:
    """A metric for each cell, one bar a variant; where there is one cell, the names stand below."""

    def panel(axis: Axes, config: Mapping[str, Any], rows, series, styles) -> None:
        several = len({row["how"] for row in rows}) > 1
        texts = [label(r["cell"]) + (f", {r['how']}" if several else "") for r in rows]
        cells = list(dict.fromkeys(texts))
        names = [name for name in styles if any(row["variant"] == name for row in rows)]
        width = 0.8 / max(1, len(names))
        offsets = (np.arange(len(names)) - (len(names) - 1) / 2) * width
        for name, offset in zip(names, offsets, strict=True):
            pairs = zip(texts, rows, strict=True)
            own = {text: mean(r, metric) for text, r in pairs if r["variant"] == name}
            style = styles[name]
            bars = axis.bar(
                np.arange(len(cells)) + offset,
                [own.get(cell) or 0.0 for cell in cells],
                width,
                label=name if len(cells) > 1 else None,
                color=style["color"],
                hatch=style["hatch"],
                edgecolor="white",
            )
            numbers = [_number(own.get(cell)) for cell in cells]
            axis.bar_label(bars, numbers, fontsize=7 if len(cells) < 4 else 6)
        if len(cells) == 1:
            axis.set_xticks(offsets, [textwrap.fill(name, 10) for name in names], fontsize=8)
            axis.set_xlabel(cells[0])
        else:
            wrapped = [textwrap.fill(cell, 14, break_on_hyphens=False) for cell in cells]
            axis.set_xticks(range(len(cells)), wrapped)
        axis.set_ylabel(METRICS[metric][0].format(reference=config["reference"]))
        axis.margins(y=0.1 if len(cells) == 1 else 0.3)

    return panel


def _number(value: float | None) -> str:
    """A number above its bar; none where nothing was measured."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _overhead(axis: Axes, config, rows: Sequence[Row], series, styles) -> None:
    """What the dispatch costs in each cell, with its interval."""
    for index, row in enumerate(rows):
        low, middle, high = (mean(row, f"overhead_{end}us") or 0.0 for end in ("low_", "", "high_"))
        axis.errorbar(
            index, middle, [[middle - low], [high - middle]], fmt="o", color="black", capsize=6
        )
        axis.annotate(
            f"{middle:.1f} µs\nat most {mean(row, 'overhead_bound_percent'):.2f}% of the step",
            (index, middle),
            (10, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set_xticks(range(len(rows)), [label(row["cell"]) for row in rows])
    axis.set_ylabel("µs a step, median and 95% interval")
    axis.set_title("With the dispatch less without it, paired turns", fontsize=10)
    axis.margins(0.5, 0.2)


def _turns(axis: Axes, config, rows, series: Series, styles) -> None:
    """Every turn of the last measured cell, with and without the dispatch."""
    for found in series.values():
        for name, marker, text in (("auto", "o-", "with"), ("forced", "s--", "without")):
            axis.plot(found[f"{name}_ms"], marker, ms=4, lw=1, label=f"{text} the dispatch")
    axis.set_xlabel("turn")
    axis.set_ylabel("step, ms")
    axis.set_title(f"Turns at {label(rows[-1]['cell'])}" if rows else "", fontsize=10)


def _tpot(axis: Axes, config, rows, series: Series, styles) -> None:
    """Distribution of TPOT in the last measured cell."""
    for name, found in series.items():
        values = np.sort([v for v in found.get("tpot_ms", []) if v is not None])
        if values.size:
            share = np.arange(values.size + 1) / values.size
            edges = np.concatenate([values[:1], values])
            axis.step(
                edges,
                share,
                styles[name]["line"],
                where="post",
                color=styles[name]["color"],
                label=name,
                linewidth=2,
            )
    axis.set_xlabel("time per output token, ms")
    axis.set_ylabel("share")
    axis.set_title("Distribution over requests (over turns where only steps ran)", fontsize=10)
    axis.set_ylim(0, 1.02)
    axis.set_xlim(left=0)


def _occupancy(axis: Axes, config, rows, series: Series, styles) -> None:
    """HOT, COLD and lent tokens over time in the last measured cell, of the variant that has HOT."""
    with_hot = {n: s for n, s in series.items() if any(s.get("hot_tokens", []))}
    for name, found in list(with_hot.items())[-1:]:
        hot = np.asarray(found["hot_tokens"])
        axis.stackplot(
            found["time_s"],
            hot,
            np.asarray(found["cold_tokens"]),
            labels=[f"{name}, HOT", f"{name}, COLD"],
            colors=["#0b4f8a", "#a9c6e0"],
            step="post",
        )
        if any(found["lent_tokens"]):
            axis.step(
                found["time_s"],
                found["lent_tokens"],
                "k--",
                where="post",
                label="lent to COLD",
                path_effects=[withStroke(linewidth=3.5, foreground="white")],
            )
    axis.set_xlabel("time, s")
    axis.set_ylabel("tokens in use")
    axis.set_title("HOT and COLD over time", fontsize=10)
    axis.margins(y=0.2)
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)


def _shares(axis: Axes, config, rows: Sequence[Row], series, styles) -> None:
    """Parts of a decode step, stacked, one bar for each cell and variant."""
    parts = (("attention", ""), ("matmul", "///"), ("other", "..."), ("collectives", "xxx"))
    names = [f"{row['variant']}\n{label(row['cell'])}" for row in rows]
    bottom = np.zeros(len(rows))
    greys = ("#0b4f8a", "#e08e2b", "#b8b8b8", "#5e8f3a", "#ffffff")
    for color, (part, hatch) in zip(greys, (*parts, ("idle", "")), strict=True):
        heights = np.array([mean(row, f"{part}_ms") or 0.0 for row in rows])
        axis.bar(
            names, heights, 0.6, bottom, label=part, color=color, hatch=hatch, edgecolor="#404040"
        )
        bottom += heights
    axis.set_ylabel("ms of a decode step")
    axis.margins(y=0.2)


def _roofline(axis: Axes, config, rows: Sequence[Row], series, styles) -> None:
    """Rate over arithmetic intensity, under what the device reached in the same run."""
    if not rows:
        return
    matmul = max(mean(row, "ceiling_tflops") or 0.0 for row in rows)
    bandwidth = max(mean(row, "ceiling_gb_s") or 0.0 for row in rows)
    points = [(mean(r, "flop_per_byte") or 1.0, mean(r, "tflops") or 0.0) for r in rows]
    ridge = matmul / bandwidth * 1000
    low, high = min(min(x for x, _ in points), ridge) / 3, max(max(x for x, _ in points), ridge) * 8
    at = np.geomspace(low, high, 100)
    axis.loglog(at, np.minimum(at * bandwidth / 1000, matmul), "k-", label="measured ceilings")
    for name, style in styles.items():
        own = [(p, r) for p, r in zip(points, rows, strict=True) if r["variant"] == name]
        for index, ((x, y), row) in enumerate(own):
            axis.plot(
                x, y, style["marker"], color=style["color"], label=None if index else name, ms=7
            )
            axis.annotate(
                ", ".join(map(value_text, row["cell"].values())),
                (x, y),
                (5, -10),
                textcoords="offset points",
                fontsize=7,
            )
    axis.set_xlabel("FLOP per byte that must move")
    axis.set_ylabel("TFLOP/s")


X_LABELS = {
    "prefix_tokens": "shared prefix P, tokens",
    "batch": "batch B, rows",
    "classes": "distinct prefixes k",
}
PICTURES: dict[str, Sequence[Callable[..., None]]] = {
    "ladder": (
        _ladder("prefix_tokens", "tok_s"),
        _ladder("prefix_tokens", "speedup"),
        _tpot,
        _occupancy,
    ),
    "classes": (_ladder("classes", "tok_s"), _ladder("classes", "speedup"), _tpot, _occupancy),
    "concurrency": (_ladder("batch", "tok_s"), _ladder("batch", "step_ms")),
    "crossover": (_ladder("batch", "step_ms"), _ladder("batch", "to_cascade")),
    "dispatch": (_ladder("batch", "dense_percent"), _ladder("batch", "tok_s")),
    "bars": (_bars("tok_s"), _tpot, _occupancy),
    "paired": (_overhead, _turns),
    "steps": (_bars("step_ms"), _bars("tok_s")),
    "shares": (_shares,),
    "kernels": (_bars("us"), _roofline),
    "roofline": (_roofline,),
    "pools": (_bars("tok_s"), _bars("cold_prefix_peak"), _occupancy),
    "sharing": (_bars("tok_s"), _bars("prefix_mib_step"), _occupancy),
    "replay": (_bars("tok_s"), _bars("ttft_p50_s"), _tpot, _occupancy),
}
