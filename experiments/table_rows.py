"""Rows of a table: enters finished measurements, leaves ours beside the paper's.

A row is one cell with one variant: ``cell`` (its keys), ``variant``, ``how``, ``repetitions``,
``metrics`` (``{name: {"mean", "low", "high"}}``, the range over repetitions), ``paper`` (``{name:
value}``), ``not_run`` (a reason, or None). Ratios are of means; the paper's are made of its printed
numbers in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import paper_numbers
from experiments.table_serving import same_answers
from experiments.table_spec import Unit, cells, variants_of

# What a metric is called in a table, and how it is shown.
METRICS = {
    "tok_s": ("output tok/s", ".0f"),
    "speedup": ("speed-up over {reference}", ".2f"),
    "speedup_predicted": ("predicted speed-up", ".2f"),
    "s_attention": ("speed-up of attention", ".1f"),
    "tpot_p50_ms": ("TPOT p50, ms", ".3g"),
    "tpot_p99_ms": ("TPOT p99, ms", ".3g"),
    "ttft_p50_s": ("TTFT p50, s", ".2f"),
    "ttft_p99_s": ("TTFT p99, s", ".2f"),
    "step_ms": ("step, ms", ".4g"),
    "to_cascade": ("dense / cascade", ".2f"),
    "forced_ms": ("without dispatch, ms", ".4g"),
    "overhead_us": ("dispatch, µs a step", ".1f"),
    "overhead_low_us": ("from, µs", ".1f"),
    "overhead_high_us": ("to, µs", ".1f"),
    "overhead_percent": ("dispatch, % of step", ".2f"),
    "overhead_bound_percent": ("at most, % of step", ".2f"),
    "m_eff": ("M_eff", ".0f"),
    "dense_percent": ("dense steps, %", ".0f"),
    "hit_percent": ("cache hits, % of prompt", ".1f"),
    "tokens_saved": ("tokens saved", ".0f"),
    "prefix_mib_step": ("prefix KV read/step, MiB", ".1f"),
    "hot_peak": ("HOT peak, tokens", ".0f"),
    "cold_peak": ("COLD peak, tokens", ".0f"),
    "lent_peak": ("lent peak, tokens", ".0f"),
    "hot_admitted": ("into HOT, tokens", ".0f"),
    "hot_released": ("out of HOT, tokens", ".0f"),
    "cold_prefix_peak": ("prefix in COLD, tokens", ".0f"),
    "rows_peak": ("rows peak", ".0f"),
    "attention_percent": ("attention (alpha), %", ".1f"),
    "matmul_percent": ("matmul, %", ".1f"),
    "other_percent": ("other, %", ".1f"),
    "collectives_percent": ("collectives (beta), %", ".1f"),
    "idle_percent": ("idle (gamma), %", ".1f"),
    "us": ("µs", ".1f"),
    "device_us": ("µs in kernels", ".1f"),
    "slowdown": ("time / shared", ".1f"),
    "gb_s": ("GB/s", ".0f"),
    "tflops": ("TFLOP/s", ".3g"),
    "flop_per_byte": ("FLOP/byte", ".3g"),
    "of_roofline_percent": ("of roofline, %", ".0f"),
}

type Row = dict[str, Any]


def make_rows(
    config: Mapping[str, Any], measured: Sequence[tuple[Unit, Mapping[str, Any]]]
) -> list[Row]:
    """The rows of a table, in the order of its cells.

    Args:
      config: the checked config.
      measured: finished units and their results.
    """
    groups = []
    for cell in cells(config):
        group: list[Row] = []
        identity = {key: cell[key] for key in config["axes"]}
        for variant in variants_of(config, cell):
            results = [
                result["metrics"]
                for unit, result in measured
                if unit.cell == cell and unit.variant == variant
            ]
            group.append(
                {
                    "cell": identity,
                    "variant": variant,
                    "how": cell["how"],
                    "repetitions": len(results),
                    "metrics": _over_repetitions(results),
                    "paper": paper_numbers.values(config["paper"], config["axes"], cell, variant),
                    "not_run": cell.get("not_run") or (None if results else lacks_devices(cell)),
                }
            )
        _add_speedup(group, config["reference"])
        groups.append(group)
    for name in config["derive"]:
        DERIVED[name](groups)
    return [row for group in groups for row in group]


def lacks_devices(cell: Mapping[str, Any]) -> str | None:
    """Why a cell cannot be measured here, if there are too few devices."""
    there = jax.device_count()
    if cell["tp"] <= there:
        return None
    return f"it needs {cell['tp']} devices and JAX sees {there}"


def agreement(
    config: Mapping[str, Any], measured: Sequence[tuple[Unit, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """What ``same_answers`` finds for each cell and repetition that several variants served."""
    answers: dict[tuple, dict[str, Any]] = {}
    for unit, result in measured:
        if result.get("answers"):
            key = (unit.cell["how"], *(str(unit.cell[k]) for k in config["axes"]), unit.repetition)
            answers.setdefault(key, {})[unit.variant] = result["answers"]
    found = []
    for key, by_variant in answers.items():
        if len(by_variant) > 1:
            cell = dict(zip(config["axes"], key[1:-1], strict=True))
            found.append({"cell": cell, "repetition": key[-1], **same_answers(by_variant)})
    return found


def mean(row: Row, metric: str) -> float | None:
    """Our value; None where it was not measured."""
    value = row["metrics"].get(metric)
    return None if value is None else value["mean"]


def _over_repetitions(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(name for result in results for name in result)
    found = {}
    for name in names:
        values = [result[name] for result in results if result.get(name) is not None]
        if values:
            found[name] = {
                "mean": float(np.mean(values)),
                "low": float(min(values)),
                "high": float(max(values)),
            }
    return found


def _set(row: Row, metric: str, value: float) -> None:
    row["metrics"][metric] = {"mean": value, "low": value, "high": value}


def _ratio(group: Sequence[Row], metric: str, over: Row, name: str, *, inverse: bool) -> None:
    """Sets ``name`` to the ratio of a metric to that of the row ``over``, ours and the paper's."""
    for row in group:
        ours, theirs = mean(row, metric), mean(over, metric)
        if ours and theirs:
            _set(row, name, theirs / ours if inverse else ours / theirs)
        paper, base = row["paper"].get(metric), over["paper"].get(metric)
        if paper and base and name not in row["paper"]:
            row["paper"][name] = base / paper if inverse else paper / base


def _find(group: Sequence[Row], variant: str) -> Row | None:
    return next((row for row in group if row["variant"] == variant), None)


def _add_speedup(group: list[Row], reference: str) -> None:
    if base := _find(group, reference):
        throughput = any(mean(row, "tok_s") or row["paper"].get("tok_s") for row in group)
        _ratio(group, "tok_s" if throughput else "step_ms", base, "speedup", inverse=not throughput)


def _dense_over_cascade(groups: Sequence[list[Row]]) -> None:
    """``to_cascade``: a step with the dense backend over one with the cascade backend."""
    for group in groups:
        if base := _find(group, "cascade"):
            dense = [row for row in group if row["variant"] == "dense"]
            _ratio(dense, "step_ms", base, "to_cascade", inverse=False)


def _amdahl(groups: Sequence[list[Row]]) -> None:
    """Amdahl's prediction (the paper's Eq. 3 and 4) from the baseline's shares and the speed-up of the
    attention inside the engine."""
    for group in groups:
        base = _find(group, "uniform16")
        if base is None or not (attention := mean(base, "attention_ms")):
            continue
        alpha = (mean(base, "attention_percent") or 0.0) / 100
        for row in group:
            if row is not base and (own := mean(row, "attention_ms")):
                _set(row, "s_attention", attention / own)
                _set(row, "speedup_predicted", 1 / (1 - alpha + alpha * own / attention))


def _layouts(groups: Sequence[list[Row]]) -> None:
    """``slowdown``: time over a layout against that over the shared one, same implementation."""
    rows = [row for group in groups for row in group]
    for base in rows:
        if base["cell"].get("storage") == "shared":
            same = [row for row in rows if row["variant"] == base["variant"]]
            _ratio(same, "us", base, "slowdown", inverse=False)


DERIVED: dict[str, Callable[[Sequence[list[Row]]], None]] = {
    "dense_over_cascade": _dense_over_cascade,
    "amdahl": _amdahl,
    "layouts": _layouts,
}
