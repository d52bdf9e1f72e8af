"""Head groups and their pages: what a group size wastes, and what its page tables cost.

    python -m experiments.tangram_attention_pages --config=configs/tangram/page_fragmentation.py

For each group size ``G_h``, groups over all layers and groups within a layer: bytes allocated for one
request, the share that no token fills, and the time to take and give back the pages of all its groups,
in one jitted call for all groups and in one call for each. ``unified`` is one page table for all
heads of the model. Written: ``result.json`` and ``fragmentation.png``, the shape of the paper's Figure 8.

Fields of a config:
  models, profile         as in ``experiments.tangram_attention``.
  context, retention      of the request.
  group_sizes             values of ``G_h``; those that do not divide the heads are left out.
  page_size, dtype        of the pool.
  repeats                 timed updates of the tables; 0 times none.
  bar                     most that may be wasted at ``G_h`` 4, groups over all layers.
  out                     folder for what is written.
"""

import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from matplotlib.figure import Figure

from experiments import flags as shared_flags
from experiments import report
from experiments.serve import make_console
from experiments.tangram_attention_caches import Cell, Demands, read_demands
from kvgrain_jax.budgets import HeadGroups, footprint, group_pages, make_groups, pool
from kvgrain_jax.budgets.profile import check_retention
from kvgrain_jax.errors import ConfigError
from kvgrain_jax.pools import cold

FIELDS = (
    *("models", "profile", "context", "retention", "group_sizes", "page_size", "dtype"),
    *("repeats", "bar", "out"),
)
UNIFIED = "unified"
COLOURS = {"global": "#0b4f8a", "layer": "#e08e2b"}


def fragmentation(
    config: Mapping[str, Any], console: rich.console.Console | None = None
) -> list[dict[str, Any]]:
    """Runs a config.

    Returns:
      One row for each model, scope and group size: ``allocated_gb``, ``wasted_gb``,
      ``fragmentation``, ``groups``, ``pages``, ``met`` where there is a bar, ``together_ms`` and
      ``each_ms``: pages of all groups taken and given back in one call, or in one for each group.

    Raises:
      ConfigError: the config is wrong.
    """
    console = console or make_console()
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    check_retention(config["retention"], "config.retention")
    folder = report.check_out_folder(config["out"])
    rows: list[dict[str, Any]] = []
    for name in config["models"]:
        demands = read_demands(name, config["profile"])
        console.print(f"{name}: {demands.source}")
        budgets = demands.budgets(Cell(config["context"], 1, config["retention"]))
        found = [
            _row(demands, groups, scope, budgets, config)
            for scope, groups in _groups(demands, config)
        ]
        rows += found
        report.write_result(folder, "tangram_attention_pages", config, rows)
        console.print(_table(name, found, config))
    picture = _draw(rows, folder / "fragmentation.png", config)
    console.print(f"Written: {folder / 'result.json'}, {picture}")
    return rows


def _groups(demands: Demands, config: Mapping[str, Any]) -> list[tuple[str, HeadGroups]]:
    heads, found = demands.fractions, []
    for scope in ("global", "layer"):
        in_scope = heads.size if scope == "global" else heads.shape[1]
        for size in config["group_sizes"]:
            if in_scope % size == 0:
                found.append((scope, make_groups(heads, size, scope=scope)))
    everything = np.moveaxis(np.indices(heads.shape), 0, -1).reshape(1, -1, 2).astype(np.int32)
    return [*found, (UNIFIED, HeadGroups(everything, *heads.shape))]


def _row(
    demands: Demands,
    groups: HeadGroups,
    scope: str,
    budgets: np.ndarray,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    taken = footprint(
        groups,
        budgets,
        page_size=config["page_size"],
        head_dim=demands.model.head_dim,
        itemsize=jnp.dtype(config["dtype"]).itemsize,
    )
    row: dict[str, Any] = {
        "model": demands.name,
        "demands": demands.source,
        "scope": scope,
        "group_size": groups.group_size,
        "groups": groups.n_groups,
        "pages": taken.pages,
        "allocated_gb": taken.allocated_bytes / 1e9,
        "wasted_gb": (taken.allocated_bytes - taken.used_bytes) / 1e9,
        "fragmentation": taken.fragmentation,
    }
    if (scope, groups.group_size) == ("global", 4):
        row["met"] = taken.fragmentation <= config["bar"]
    if config["repeats"]:
        counts = group_pages(groups, budgets, config["page_size"])
        row |= time_tables(counts, config["repeats"])
    return row


@partial(jax.jit, donate_argnums=0, static_argnames="width")
def _take_and_give(pages: cold.ColdState, counts: jax.Array, *, width: int):
    """Reserves the pages of groups and releases them."""
    table = pool.empty_table(len(counts), width)
    pages, table, fits = pool.reserve(pages, table, jnp.zeros_like(counts), counts)
    pages, released = pool.release(pages, table)
    return pages, fits & released


def time_tables(counts: np.ndarray, repeats: int) -> dict[str, float]:
    """Milliseconds to take the pages of all groups and give them back.

    Args:
      counts: pages of each group.
      repeats: of which the median is taken.
    """
    width, total = int(counts.max()), int(counts.sum())
    counts = counts.astype(np.int32)
    pages = cold.init(total, 0)
    together, each = (
        [jnp.asarray(counts)],
        [jnp.asarray(counts[i : i + 1]) for i in range(len(counts))],
    )

    def run(parts: Sequence[jax.Array]) -> float:
        nonlocal pages
        begin = time.perf_counter()
        for part in parts:
            pages, _ = _take_and_give(pages, part, width=width)
        jax.block_until_ready(pages)
        return (time.perf_counter() - begin) * 1e3

    def median(parts: Sequence[jax.Array]) -> float:
        run(parts[:1])
        return statistics.median(run(parts) for _ in range(repeats))

    return {"together_ms": median(together), "each_ms": median(each)}


def _table(name: str, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]):
    columns = ["scope", "G_h", "groups", "pages", "GB", "wasted", f"<= {config['bar']:.0%}"]
    columns += ["tables ms", "one by one ms"] if config["repeats"] else []
    title = f"{name}: pages of {config['context']} tokens, {config['retention']:.0%} kept"

    def cells(row: Mapping[str, Any]) -> list[str]:
        shown = [row["scope"], *(str(row[field]) for field in ("group_size", "groups", "pages"))]
        shown += [f"{row['allocated_gb']:.3f}", f"{row['fragmentation']:.2%}"]
        shown.append(("yes" if row["met"] else "no") if "met" in row else "")
        return shown + [f"{row[f]:.3f}" for f in ("together_ms", "each_ms") if f in row]

    return report.table(title, columns, [cells(row) for row in rows])


def _draw(
    rows: Sequence[Mapping[str, Any]], path: pathlib.Path, config: Mapping[str, Any]
) -> pathlib.Path:
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(6.2 * len(names), 4.4), layout="constrained")
    figure.suptitle(
        f"Head-group pages: {config['context']} tokens, {config['retention']:.0%} kept",
        fontsize=13,
        x=0.01,
        ha="left",
    )
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        cost: Any = axis.twinx() if config["repeats"] else None
        for scope, colour in COLOURS.items():
            own = [row for row in rows if row["model"] == name and row["scope"] == scope]
            sizes = [row["group_size"] for row in own]
            waste = [100 * row["fragmentation"] for row in own]
            axis.plot(sizes, waste, color=colour, marker="o", label=f"wasted, {scope} groups")
            if cost is not None and scope == "global":
                for field, line, label in (
                    ("together_ms", "--", "tables, one call"),
                    ("each_ms", ":", "tables, a call a group"),
                ):
                    cost.plot(
                        sizes,
                        [row[field] for row in own],
                        color="#8c3b68",
                        linestyle=line,
                        label=label,
                    )
        unified = next(row for row in rows if row["model"] == name and row["scope"] == UNIFIED)
        axis.axhline(
            100 * unified["fragmentation"], color="black", linewidth=1, label="unified page"
        )
        axis.axhline(
            100 * config["bar"], color="grey", linewidth=1, linestyle=":", label="goal at 4"
        )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("heads of a group, $G_h$")
        axis.set_ylabel("wasted, % of allocated")
        axis.set_title(name, fontsize=11, loc="left")
        lines, labels = axis.get_legend_handles_labels()
        if cost is not None:
            cost.set_ylabel("page tables of a request, ms")
            cost.set_yscale("log")
            more = cost.get_legend_handles_labels()
            lines, labels = lines + more[0], labels + more[1]
        axis.legend(lines, labels, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    shared_flags.run_config(fragmentation)
