"""Serves a cell's requests with one variant: enters a unit, leaves metrics and what pictures need.

Metrics (``None`` where there is none):
  tok_s                           generated tokens a second, first arrival to last token.
  tpot_p50_ms, tpot_p99_ms        time per output token after the first, over requests.
  ttft_p50_s, ttft_p99_s          time to first token from arrival, streamed: waiting is part of it.
  dense_percent                   of the decode steps took the dense backend.
  hit_percent, tokens_saved       prompt tokens found in the cache: share of all, and how many.
  prefix_mib_step                 keys and values of shared prefixes that a step reads, in the mean.
  hot_peak, cold_peak, lent_peak  tokens in HOT slabs, in COLD pages, in HOT lent to COLD.
  hot_admitted, hot_released      tokens that entered and left HOT: admissions and promotions;
                                  evictions (a live prefix never leaves).
  cold_prefix_peak                tokens of shared prefixes that lie in COLD because HOT had no room.
  rows_peak                       requests that ran at once.
  duration_s, warmup_s            of the run, and of the compilation before it.
"""

import hashlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.running import run_system
from experiments.table_spec import Unit
from experiments.table_workloads import prepare_cell
from experiments.workloads import Target
from kvgrain_jax.engine import RunMetrics, TokenEvent
from models import LoadedModel

SERIES_POINTS = 200


def measure(
    unit: Unit, load: Callable[[str, str, int], LoadedModel], progress: Callable[[str], None]
) -> dict[str, Any] | None:
    """Serves the cell.

    Args:
      unit: the unit.
      load: the model of a source, a dtype and a number of devices.
      progress: told what is going on.

    Returns:
      ``metrics``; ``series`` for pictures; ``answers``, of each request its first token and a digest
      of all of them. None where the user interrupted it.

    Raises:
      KVGrainError: the cell cannot be served by this variant.
    """
    make = prepare_cell(unit.cell, unit.repetition)
    loaded = load(unit.model, unit.dtype, unit.cell["tp"])
    assert unit.engine is not None
    context = min(unit.engine.max_context or loaded.model.max_context, loaded.model.max_context)
    workload = make(Target(loaded.model.vocabulary, context, loaded.tokenizer))
    finished = 0

    def on_event(event: TokenEvent) -> None:
        nonlocal finished
        if event.finished:
            finished += 1
            progress(f"{finished}/{len(workload.requests)} requests")

    progress("compiling")
    run = run_system(loaded.model, unit.engine, workload.requests, on_event)
    if not run.complete:
        return None
    return {
        "metrics": {**figures(run.metrics), "warmup_s": run.warmup_s},
        "series": series(run.metrics),
        "answers": {r.id: [r.tokens[0], _digest(r.tokens)] for r in run.metrics.requests},
        "facts": workload.facts,
    }


def figures(metrics: RunMetrics) -> dict[str, float]:
    """The metrics above, but for the compilation."""
    summary = metrics.summary()
    hot = [sample.hot_tokens for sample in metrics.samples]
    moves = [after - before for before, after in pairwise([0, *hot])]
    samples = metrics.samples
    return {
        "tok_s": summary["output_tokens_per_s"],
        "tpot_p50_ms": summary["tpot_p50_s"] * 1000,
        "tpot_p99_ms": summary["tpot_p99_s"] * 1000,
        "ttft_p50_s": summary["ttft_p50_s"],
        "ttft_p99_s": summary["ttft_p99_s"],
        "dense_percent": 100 * summary["backend_fractions"].get("dense", 0.0),
        "hit_percent": 100 * summary["cached_tokens"] / max(1, summary["prompt_tokens"]),
        "tokens_saved": summary["cached_tokens"],
        "prefix_mib_step": summary["prefix_bytes_read_per_step"] / 2**20,
        "hot_peak": summary["peak_hot_tokens"],
        "cold_peak": summary["peak_cold_tokens"],
        "lent_peak": max((s.lent_tokens for s in samples), default=0),
        "hot_admitted": sum(move for move in moves if move > 0),
        "hot_released": -sum(move for move in moves if move < 0),
        "cold_prefix_peak": max(
            (max(0, s.prefix_tokens - s.hot_tokens) for s in samples), default=0
        ),
        "rows_peak": summary["peak_running"],
        "duration_s": summary["duration_s"],
    }


def series(metrics: RunMetrics) -> dict[str, Any]:
    """What pictures draw: TPOT of the requests, and the pools over time at 200 points at most."""
    samples = metrics.samples
    chosen = np.unique(np.linspace(0, len(samples) - 1, SERIES_POINTS).astype(int))
    picked = [samples[i] for i in chosen] if samples else []
    return {
        "tpot_ms": [round(r.tpot * 1000, 4) for r in metrics.requests],
        "time_s": [round(s.time, 4) for s in picked],
        "hot_tokens": [s.hot_tokens for s in picked],
        "cold_tokens": [s.cold_tokens for s in picked],
        "lent_tokens": [s.lent_tokens for s in picked],
    }


def same_answers(answers: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, int]:
    """How many requests all variants answered (``compared``), and for how many of these they gave
    the ``same`` tokens and the ``same_first`` token; ``answers`` holds each variant's."""
    one, *others = answers.values()
    common = [name for name in one if all(name in other for other in others)]

    def equal(pick: Callable[[list[Any]], Any]) -> int:
        return sum(all(pick(other[n]) == pick(one[n]) for other in others) for n in common)

    return {
        "same": equal(lambda answer: answer),
        "same_first": equal(lambda answer: answer[0]),
        "compared": len(common),
    }


def _digest(tokens: tuple[int, ...]) -> str:
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=4).hexdigest()
