"""Picture of ``retention``: each task over the retention, methods as lines, intervals as bands."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.retention_statistics import FULL, RETRIEVAL
from experiments.retention_tasks import PERPLEXITY

# Colour, line and marker: told apart in grey as well.
STYLES = {
    "static": ("#0b4f8a", "-", "o"),
    "dynamic": ("#e08e2b", "--", "s"),
    "static_margin": ("#5aa0d8", "-.", "v"),
    "static_crossed": ("#5e8f3a", ":", "^"),
    "uniform": ("#222222", "-", "D"),
    "permuted": ("#8c3b68", "--", "x"),
    "protected": ("#9a9a9a", "-.", "+"),
    "random": ("#c4b000", ":", "*"),
}
LABELS = {
    "static": "static",
    "dynamic": "dynamic",
    "static_margin": "static, mean + 2 std",
    "static_crossed": "static, profile of other domain",
    "uniform": "uniform",
    "permuted": "static, permuted over heads",
    "protected": "sinks and newest tokens",
    "random": "static, random tokens",
}
COLUMNS = 4


def draw_retention(
    path: pathlib.Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Draws a run.

    Args:
      path: the PNG to write.
      config: of the run.
      rows: as ``retention`` returns them.
    """
    panels = [RETRIEVAL] if any(task != PERPLEXITY for task in config["tasks"]) else []
    panels += config["tasks"]
    lines = -(-(len(panels) + 1) // COLUMNS)
    figure = Figure(figsize=(14, 3.4 * lines + 0.5), layout="constrained")
    figure.suptitle(
        f"{config['model']}, contexts of {config['context_tokens']} tokens, {config['scorer']} scores, "
        "equal bytes",
        fontsize=13,
        x=0.01,
        ha="left",
    )
    axes = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    for axis, task in zip(axes, panels, strict=False):
        _panel(axis, task, [row for row in rows if row["task"] == task and row["domain"] == "all"])
    for axis in axes[len(panels) :]:
        axis.axis("off")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center", frameon=False, fontsize=10)
    figure.savefig(path, dpi=150)


def _panel(axis: Axes, task: str, rows: Sequence[Mapping[str, Any]]) -> None:
    figure = "nll_added" if task == PERPLEXITY else "accuracy"
    for row in rows:
        if row["method"] == FULL:
            axis.axhline(row[figure], color="black", linewidth=1, linestyle=(0, (1, 2)))
    for method, (colour, line, marker) in STYLES.items():
        found = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: row["retention"]
        )
        if not found:
            continue
        shares = [row["retention"] for row in found]
        axis.plot(
            shares,
            [row[figure] for row in found],
            color=colour,
            linestyle=line,
            marker=marker,
            markersize=5,
            label=LABELS[method],
        )
        axis.fill_between(
            shares,
            [row[figure + "_low"] for row in found],
            [row[figure + "_high"] for row in found],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
    contexts = rows[0]["contexts"] if rows else 0
    questions = rows[0]["questions"] if rows else 0
    axis.set_title(
        f"{task.replace('_', ' ')} ({contexts} contexts, {questions} questions)",
        fontsize=10,
        loc="left",
    )
    axis.set_xlabel("retention")
    axis.set_ylabel(
        "nats a token more than the full cache" if task == PERPLEXITY else "answered right"
    )
    if task != PERPLEXITY:
        axis.set_ylim(-0.03, 1.03)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)
