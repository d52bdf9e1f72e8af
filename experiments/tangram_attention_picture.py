"""Picture of ``tangram_attention``: latency over batch and over eviction, and the parts of one layer.

Rows of the experiment enter, a PNG leaves: the shapes of the paper's Figures 5 and 13; of Table 1, where the
rest of the step was timed, what a whole step consists of.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.pictures import stack_bars

# Colour, hatch and name of each method.
STYLES = {
    "uniform": ("#b8b8b8", "", "uniform cache"),
    "static": ("#e08e2b", "///", "one split for all heads"),
    "planned": ("#8c3b68", "...", "planned on the host"),
    "aot": ("#0b4f8a", "", "split table, ahead of time"),
}
PLAN = "#d9a8c4"
# The same of the parts of a whole step, from below.
STEP_PARTS = {
    "rest_ms": ("#b8b8b8", "", "rest of the step"),
    "attention_ms": ("#0b4f8a", "", "attention"),
    "plan_ms": ("#8c3b68", "...", "planning on the host"),
    "upload_ms": (PLAN, "xxx", "upload of the plan"),
}


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path, bar: float) -> pathlib.Path:
    """Draws the rows that were timed; see ``attention``."""
    timed = [row for row in rows if "total_ms" in row and row["method"] in STYLES]
    if any("rest_ms" in row for row in timed):
        return _draw_steps(timed, path)
    names = list(dict.fromkeys(row["model"] for row in timed))
    figure = Figure(figsize=(15.5, 4.2 * max(1, len(names))), layout="constrained")
    axes = figure.subplots(max(1, len(names)), 3, squeeze=False)
    for line, name in zip(axes, names, strict=False):
        own = [row for row in timed if row["model"] == name]
        _over(line[0], own, *_most_common(own, "batch", name))
        _over(line[1], own, *_most_common(own, "retention", name))
        _parts(line[2], own)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(
        f"Decode attention of all layers at equal tokens kept; goal: {bar:g} x uniform",
        fontsize=13,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=150)
    return path


def _draw_steps(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """One bar for each model, cell and method: the parts of a whole step, and the share of planning."""
    figure = Figure(figsize=(1.3 * len(rows) + 3.5, 4.6), layout="constrained")
    axis = figure.subplots()
    parts = [(style, [row.get(part, 0.0) for row in rows]) for part, style in STEP_PARTS.items()]
    totals = np.sum([heights for _, heights in parts], axis=0)
    shares = [f"\nplanning {r['plan_share']:.0%}" if r["plan_share"] else "" for r in rows]
    stack_bars(axis, parts, [f"{n:.2f} ms{s}" for n, s in zip(totals, shares, strict=True)])
    names = [
        f"{STYLES[row['method']][2].replace(', ', ',\n')}\n{row['model']}\n"
        f"{row['context']:,} tokens, B {row['batch']}\n{1 - row['retention']:.0%} evicted"
        for row in rows
    ]
    axis.set_xticks(range(len(rows)), names, fontsize=8)
    axis.set_ylabel("ms a step")
    axis.set_ylim(0, 1.15 * totals.max())
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle("A decode step and what planning takes of it", fontsize=12, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    return path


def _most_common(
    rows: Sequence[Mapping[str, Any]], field: str, name: str
) -> tuple[str, dict[str, Any], str]:
    """The field, the other two fixed to where it takes most values, and a title."""
    others = [other for other in ("context", "batch", "retention") if other != field]
    values: dict[tuple[Any, ...], set[Any]] = {}
    for row in rows:
        values.setdefault(tuple(row[other] for other in others), set()).add(row[field])
    # Of several the longest context, the largest batch.
    chosen = max(values, key=lambda key: (len(values[key]), key))
    fixed = dict(zip(others, chosen, strict=True))
    shown = ", ".join(
        f"{other} {value:,}" if other != "retention" else f"{1 - value:.0%} evicted"
        for other, value in fixed.items()
    )
    return field, fixed, f"{name}: {shown}"


def _over(
    axis: Axes, rows: Sequence[Mapping[str, Any]], field: str, fixed: dict[str, Any], title: str
) -> None:
    chosen = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
    values = sorted({row[field] for row in chosen}, reverse=field == "retention")
    methods = [name for name in STYLES if any(row["method"] == name for row in chosen)]
    width = 0.84 / max(1, len(methods))
    for index, method in enumerate(methods):
        colour, hatch, label = STYLES[method]
        for place, value in enumerate(values):
            row = next(
                (row for row in chosen if row["method"] == method and row[field] == value), None
            )
            if row is None:
                continue
            x = place + (index - (len(methods) - 1) / 2) * width
            first = place == 0
            axis.bar(
                x,
                row["attention_ms"],
                width,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                label=label if first else None,
            )
            extra = row["total_ms"] - row["attention_ms"]
            if extra:
                axis.bar(
                    x,
                    extra,
                    width,
                    bottom=row["attention_ms"],
                    label="its planning and upload" if first else None,
                    color=PLAN,
                    hatch="xxx",
                    edgecolor="white",
                )
            if "over_uniform" in row and method != "uniform":
                axis.annotate(
                    f"{row['over_uniform']:.2f}",
                    (x, row["total_ms"]),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
    labels = [f"{1 - v:.0%}" if field == "retention" else str(v) for v in values]
    axis.set_xticks(range(len(values)), labels)
    axis.set_xlabel("tokens evicted" if field == "retention" else "requests")
    axis.set_ylabel("ms a step")
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _parts(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Tokens of each program of a layer, most first, in the cell where one split costs most."""
    static = [row for row in rows if row["method"] == "static"]
    if not static:
        axis.axis("off")
        return
    worst = max(static, key=lambda row: row.get("over_uniform", row["imbalance"]))
    cell = {name: worst[name] for name in ("context", "batch", "retention")}
    for row in rows:
        if "parts" in row and all(row[name] == value for name, value in cell.items()):
            colour, _, _ = STYLES[row["method"]]
            parts = np.sort(row["parts"])[::-1]
            style = {"uniform": "-", "static": "--", "planned": ":", "aot": "-"}[row["method"]]
            axis.step(
                np.arange(len(parts)),
                parts,
                where="mid",
                color=colour,
                linestyle=style,
                linewidth=2,
            )
    axis.set_xlabel("program of one request, most tokens first")
    axis.set_ylabel("tokens")
    axis.set_title(
        f"Each method's worst layer, {cell['context']:,} tokens, B {cell['batch']}, "
        f"{1 - cell['retention']:.0%} evicted",
        fontsize=10,
        loc="left",
    )
    axis.spines[["top", "right"]].set_visible(False)
