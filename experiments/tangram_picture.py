"""Pictures of the Tangram experiments: rows of a table enter, a PNG leaves.

One panel for each metric: one line for each series over an axis of numbers, or one bar for each cell; or
stacked bars of the parts of a total. Series differ by marker and line as well as by colour, so the picture
can be read in grey.
"""

import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.pictures import stack_bars
from experiments.tangram_table import AXES, METRICS

STYLES = {
    "full": ("#8a8a8a", "s", "--"),
    "budgets": ("#e9b877", "v", ":"),
    "groups": ("#e08e2b", "^", "-."),
    "balanced": ("#0b4f8a", "o", "-"),
    "dynamic": ("#8c3b68", "D", "--"),
    "shared": ("#5e8f3a", "P", "-"),
    "granikv": ("#8a8a8a", "X", "--"),
}
OTHERS = (("#0b4f8a", "o", "-"), ("#e08e2b", "^", "-."), ("#5e8f3a", "P", ":"))
PARTS = (("#0b4f8a", ""), ("#c9c9c9", "..."), ("#e08e2b", "///"), ("#8c3b68", "xxx"))


def draw(path: pathlib.Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws the table.

    Args:
      path: the PNG to write.
      config: ``title`` and ``picture``.
      rows: axes and metrics of each cell.
    """
    picture = config["picture"]
    panels = [("stack", picture["stack"])] if picture["stack"] else []
    panels += [("lines", metric) for metric in picture["y"]]
    width = 8.5 if picture["stack"] else 4.6 * len(panels) + 1
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    figure.suptitle(config["title"], fontsize=12, x=0.01, ha="left")
    for axis, (kind, what) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        if kind == "stack":
            _stack(axis, picture, rows, what)
        elif _is_curve(picture, rows):
            _lines(axis, picture, rows, what)
        else:
            _bars(axis, picture, rows, what)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
        if axis.get_legend_handles_labels()[0]:
            outside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if kind == "stack" else {}
            axis.legend(fontsize=8, frameon=False, **outside)
    figure.savefig(path, dpi=150)


def _is_curve(picture: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a series has several points over an axis of numbers."""
    points = Counter(row[picture["series"]] for row in rows)
    numbers = all(isinstance(row[picture["x"]], int | float) for row in rows)
    return numbers and max(points.values(), default=0) > 1


def _lines(
    axis: Axes, picture: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], metric: str
) -> None:
    places = list(dict.fromkeys(str(row[picture["x"]]) for row in rows))
    for index, name in enumerate(dict.fromkeys(row[picture["series"]] for row in rows)):
        own = [row for row in rows if row[picture["series"]] == name and metric in row]
        colour, marker, line = STYLES.get(str(name), OTHERS[index % len(OTHERS)])
        axis.plot(
            [places.index(str(row[picture["x"]])) for row in own],
            [row[metric] for row in own],
            color=colour,
            marker=marker,
            linestyle=line,
            label=str(name),
        )
    axis.set_xticks(range(len(places)), places)
    axis.set_xlabel(AXES.get(picture["x"], str(picture["x"])))
    axis.set_ylim(0, 1.1 * max((row[metric] for row in rows if metric in row), default=1))
    axis.set_title(METRICS[metric][0], fontsize=11, loc="left")


def _bars(
    axis: Axes, picture: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], metric: str
) -> None:
    """One bar for each cell; there is nothing between them that a line could show."""
    own = [row for row in rows if metric in row]
    colours = [STYLES.get(str(row[picture["series"]]), OTHERS[0])[0] for row in own]
    bars = axis.bar(_names(picture, own), [row[metric] for row in own], 0.6, color=colours)
    axis.bar_label(
        bars,
        fmt=lambda value: f"{value:,.{0 if value >= 10 or value == round(value) else 2}f}",
        fontsize=8,
    )
    if all(row[metric] == round(row[metric]) for row in own):
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(METRICS[metric][0], fontsize=11, loc="left")


def _stack(
    axis: Axes, picture: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], parts: Sequence[str]
) -> None:
    stacked = [
        ((colour, hatch, METRICS[part][0]), [row.get(part, 0.0) for row in rows])
        for part, (colour, hatch) in zip(parts, PARTS, strict=False)
    ]
    totals = [row.get("total_ms", sum(row.get(part, 0.0) for part in parts)) for row in rows]
    stack_bars(axis, stacked, [f"{total:.0f}" for total in totals])
    axis.set_xticks(range(len(rows)), _names(picture, rows), fontsize=7)
    axis.set_ylabel("ms")


def _names(picture: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands under the bar of each cell: its series, and what else tells it apart."""
    kinds = [
        key
        for key in (picture["x"], "scorer")
        if key != picture["series"] and len({row.get(key) for row in rows}) > 1
    ]
    units = {"evicted": "%"}
    return [
        "\n".join(
            [str(row[picture["series"]]), *(f"{row[key]}{units.get(key, '')}" for key in kinds)]
        ).replace(" ", "\n")
        for row in rows
    ]
