"""A table as Markdown: enters the rows and where they were measured, leaves the text of ``table.md``.

Every metric has a column of the paper's numbers beside one of ours, where the paper has any; a dash
is a number that does not exist.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.table_rows import METRICS, Row
from experiments.table_spec import HOW

KEY_NAMES = {"prefix_tokens": "P", "batch": "B", "classes": "k", "suffix_tokens": "S"}


def render(
    config: Mapping[str, Any],
    rows: Sequence[Row],
    agreements: Sequence[Mapping[str, Any]],
    origins: Sequence[Mapping[str, Any]],
    *,
    failures: Mapping[str, str],
    pending: int,
) -> str:
    """The text of a table.

    Args:
      config: the checked config.
      rows: see ``experiments.table_rows``.
      agreements: see ``experiments.table_rows.agreement``.
      origins: ``device``, ``versions`` and ``commit`` of each measurement.
      failures: what went wrong, by the name of the measurement.
      pending: measurements that are not finished.
    """
    parts = [f"# {config['title']}", "", *_origin(config, origins), ""]
    parts += [f"- {note}" for note in config["notes"]]
    parts += [f"- `{how}`: {HOW[how]}." for how in dict.fromkeys(row["how"] for row in rows)]
    parts += _agreement(config, agreements)
    if pending:
        parts.append(f"- **{pending} measurements are not finished**; run the command again.")
    parts += [f"- **failed:** `{name}`: {reason}" for name, reason in failures.items()]
    parts += ["", *_table(config, rows)]
    parts += [f"- {text}: not run, {why}." for text, why in _not_run(config, rows).items()]
    return "\n".join(parts).rstrip() + "\n"


def grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        f"| {' | '.join(header)} |",
        f"| {' | '.join('---' for _ in header)} |",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]


def label(cell: Mapping[str, Any]) -> str:
    """A cell in words: ``P 8K, B 256``; words stand for themselves."""

    def words(key: str, value: Any) -> str:
        if isinstance(value, str):
            return value.removeprefix("random:")
        return f"{KEY_NAMES.get(key, key)} {value_text(value)}"

    return ", ".join(words(key, value) for key, value in cell.items())


def value_text(value: Any) -> str:
    """A value of a key; lengths of whole Ki are written so."""
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value))
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
        return f"{value // 1024}K"
    return str(value)


def _table(config: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    columns: list[tuple[str, str, str]] = []  # metric, whose, header
    for metric in config["metrics"]:
        name = METRICS[metric][0].format(reference=config["reference"])
        columns += [
            (metric, whose, f"{name}, {'ours' if whose == 'metrics' else whose}")
            for whose in ("paper", "metrics")
            if any(metric in row[whose] for row in rows)
        ]
    keys = [KEY_NAMES.get(key, key) for key in config["axes"]]
    header = [*keys, "variant", *(header for *_, header in columns), "how"]
    lines = [
        [
            *(value_text(row["cell"][key]) for key in config["axes"]),
            row["variant"],
            *(_number(row, metric, whose) for metric, whose, _ in columns),
            row["how"] + (f" x{row['repetitions']}" if row["repetitions"] > 1 else ""),
        ]
        for row in rows
        if row["metrics"] or row["paper"]
    ]
    return grid(header, lines)


def _number(row: Row, metric: str, whose: str) -> str:
    form = METRICS[metric][1]
    value = row[whose].get(metric)
    if value is None:
        return "-"
    if whose == "paper":
        return format(value, form)
    text = format(value["mean"], form)
    if row["repetitions"] > 1 and value["high"] > value["low"]:
        return f"{text} ({value['low']:{form}} to {value['high']:{form}})"
    return text


def _origin(config: Mapping[str, Any], origins: Sequence[Mapping[str, Any]]) -> list[str]:
    where = {
        f"{origin['device']['kind']}, jax {origin['versions']['jax']}, commit {origin['commit']}"
        for origin in origins
    }
    ours = "; ".join(sorted(where)) or "nothing measured yet"
    model = f"`{config['model']}` in {config['dtype']}"
    size = "" if config["size"] == "full" else f":{config['size']}"
    command = f"`python -m experiments.tables --config=configs/granikv/{config['name']}.py{size}`"
    paper = " Paper: A100-SXM4-40GB." if config["paper"] else ""
    return [f"{command}: {model}. Ours: {ours}.{paper} A range in brackets is over repetitions."]


def _agreement(config: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> list[str]:
    same, first, compared = (
        sum(entry[name] for entry in found) for name in ("same", "same_first", "compared")
    )
    if not compared:
        return []
    text = f"- Same tokens from all variants: {same} of {compared} requests"
    if same < compared and not config["must_agree"]:
        text += (
            f", the same first token for {first} (in {config['dtype']}, where sums in another order "
            "round differently; once a token differs, all that follow may)"
        )
    return [f"{text}."]


def _not_run(config: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, str]:
    return {label(row["cell"]): row["not_run"] for row in rows if row["not_run"]}
