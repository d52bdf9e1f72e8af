"""The table of a Tangram experiment as Markdown, and one cell in words for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.table_markdown import grid, value_text
from experiments.table_spec import Unit

# Header of each axis.
AXES = {
    "evicted": "evicted, %",
    "rate": "requests arriving / s",
    "group_size": "heads of a group",
}
# Header and format of each metric, in the order of the columns.
METRICS = {
    "requests_s": ("requests/s", ".3g"),
    "ratio": ("against full", ".2f"),
    "tokens_s": ("output tok/s", ".0f"),
    "rows_peak": ("running, most", ".0f"),
    "rows_mean": ("running, mean", ".1f"),
    "ttft_mean_s": ("TTFT mean, s", ".3g"),
    "ttft_p50_s": ("TTFT p50, s", ".3g"),
    "ttft_p99_s": ("TTFT p99, s", ".3g"),
    "total_ms": ("prefill, ms", ".1f"),
    "allocation_ms": ("page allocation, ms", ".2f"),
    "model_ms": ("model and scorer, ms", ".1f"),
    "eviction_ms": ("eviction, ms", ".2f"),
    "reclaim_ms": ("page reclaim, ms", ".2f"),
    "pages_reclaimed": ("pages reclaimed", ".0f"),
    "kv_mib": ("KV, MiB", ".1f"),
    "footprint_mib": ("pages of a request, MiB", ".1f"),
    "used_percent": ("pages used, %", ".1f"),
    "step_ms": ("step, ms", ".2f"),
    "prefill_s": ("all prompts, s", ".3g"),
    "same_percent": ("same tokens as the whole cache, %", ".0f"),
    "duration_s": ("run, s", ".1f"),
    "warmup_s": ("compiling, s", ".1f"),
}


def render(
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    origins: Sequence[Mapping[str, Any]],
    *,
    failures: Mapping[str, str],
    pending: int,
) -> str:
    """The text of a table.

    Args:
      config: the checked config.
      rows: for each measured cell its axes and metrics.
      origins: ``device``, ``versions``, ``commit`` and ``demands`` of each measurement.
      failures: what went wrong, by the name of the cell.
      pending: cells that are not measured.
    """
    where = {
        f"{o['device']['kind']}, jax {o['versions']['jax']}, commit {o['commit']}" for o in origins
    }
    command = f"`python -m experiments.tangram --config=configs/tangram/{config['name']}.py`"
    ours = "; ".join(sorted(where)) or "nothing measured yet"
    parts = [
        f"# {config['title']}",
        "",
        f"{command}: `{config['model']}` in {config['dtype']}. Ours: {ours}.",
        "",
    ]
    parts += [f"- {note}" for note in config["notes"]]
    demands = sorted({origin["demands"] for origin in origins})
    parts += [f"- demands of the heads: {source}" for source in demands]
    if pending:
        parts.append(f"- **{pending} cells are not measured**; run the command again.")
    parts += [f"- **failed:** `{name}`: {reason}" for name, reason in failures.items()]
    metrics = [metric for metric in METRICS if any(metric in row for row in rows)]
    header = [
        *(AXES.get(axis, axis) for axis in config["axes"]),
        *(METRICS[metric][0] for metric in metrics),
    ]
    lines = [
        [
            *(value_text(row[axis]) for axis in config["axes"]),
            *(_number(row, metric) for metric in metrics),
        ]
        for row in rows
    ]
    return "\n".join([*parts, "", *grid(header, lines)]).rstrip() + "\n"


def in_words(metrics: Mapping[str, Any]) -> str:
    """Metrics of one cell in one line."""
    return ", ".join(f"{METRICS[name][0]} {_number(metrics, name)}" for name in metrics)


def agreement(
    result: Mapping[str, Any], measured: Sequence[tuple[Unit, Mapping[str, Any]]]
) -> dict[str, float]:
    """How a cell compares with the whole cache, where one was measured in the same situation.

    Returns:
      ``ratio`` of the throughputs; ``same_percent``, tokens until the first that differs, over all.
    """
    own = next(unit.cell for unit, other in measured if other is result)
    for unit, other in measured:
        situation = {k: v for k, v in unit.cell.items() if k not in ("system", "evicted")}
        if unit.cell["system"] not in ("full", "granikv"):
            continue
        if any(own.get(key) != value for key, value in situation.items() if key != "group_size"):
            continue
        found: dict[str, float] = {}
        if "requests_s" in other["metrics"]:
            found["ratio"] = result["metrics"]["requests_s"] / other["metrics"]["requests_s"]
        if other["answers"]:
            pairs = [(result["answers"][name], whole) for name, whole in other["answers"].items()]
            same = sum(_same(answer, whole) for answer, whole in pairs)
            found["same_percent"] = 100 * same / sum(len(whole) for _, whole in pairs)
        return found
    return {}


def _same(answer: Sequence[int], whole: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    equal = [a == b for a, b in zip(answer, whole, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def _number(row: Mapping[str, Any], metric: str) -> str:
    value = row.get(metric)
    return "-" if value is None else format(value, METRICS[metric][1])
