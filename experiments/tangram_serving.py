"""Serves conversations and single requests: enters a cell and a bench, leaves figures of Figures 10, 12, 14.

In ``throughput`` conversations have a long context and ask question after question, each when the one
before is answered. A cache that is dropped to make room for others is computed again for the next
question, as in an engine with a prefix cache. In ``ttft`` single requests arrive as a Poisson process.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.tangram_systems import Bench
from experiments.workloads import arrival_times
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.engine import Request


def measure_throughput(cell: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """Serves the conversations of a cell.

    Args:
      cell: ``system``, ``evicted``, ``group_size``; ``conversations``, ``context_tokens``, ``turns``,
        ``question_tokens``, ``output_tokens``; ``full_rows``: whole caches of the longest context
        that fit the pool; ``patience`` of ``HeadEngineConfig``.
      bench: model and budgets.

    Returns:
      ``requests_s`` and ``tokens_s``; ``rows_peak`` and ``rows_mean``: requests that ran at once;
      ``ttft_mean_s``; ``footprint_mib``: pages of one conversation; ``used_percent`` of them by
      tokens; ``duration_s`` and ``warmup_s``; and ``answers``.
    """
    engine = make_engine(cell, bench)
    warm = _conversations(cell, bench, 1, "warm")
    begin = time.perf_counter()
    _converse(engine, warm, 4)  # compiles what conversations need, and nothing else
    warmup_s = time.perf_counter() - begin
    footprint = engine.footprint(Request("first", warm["warm-0"][0], 1))
    found = _converse(
        engine,
        _conversations(cell, bench, cell["conversations"], "talk"),
        cell["output_tokens"],
    )
    engine.check_integrity()
    return found | {
        "footprint_mib": footprint.allocated_bytes / 2**20,
        "used_percent": 100 * (1 - footprint.fragmentation),
        "warmup_s": warmup_s,
    }


def measure_ttft(cell: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """Serves single requests that arrive at ``rate`` a second.

    Args:
      cell: as for ``measure_throughput``, with ``rate`` and ``requests`` in place of conversations;
        ``context_tokens`` are lengths that take turns.
      bench: model and budgets.

    Returns:
      ``ttft_mean_s``, ``ttft_p50_s``, ``ttft_p99_s``; ``requests_s``; ``duration_s``; ``warmup_s``.
    """
    lengths = cell["context_tokens"]
    engine = make_engine(cell, bench)
    rng = np.random.default_rng(cell["seed"])
    vocabulary = bench.loaded.model.vocabulary

    def request(name: str, n_tokens: int, new: int, arrival: float) -> Request:
        return Request(name, rng.integers(0, vocabulary, n_tokens), new, arrival=arrival)

    begin = time.perf_counter()
    engine.run([request("warm", min(lengths), 4, 0.0)])
    warmup_s = time.perf_counter() - begin
    arrivals = arrival_times(cell["requests"], "poisson", cell["rate"], cell["seed"])
    requests = [
        request(f"r{i}", lengths[i % len(lengths)], cell["output_tokens"], arrival)
        for i, arrival in enumerate(arrivals)
    ]
    metrics = engine.run(requests)
    summary = metrics.summary()
    return {
        "ttft_mean_s": float(np.mean([r.ttft for r in metrics.requests])),
        "ttft_p50_s": summary["ttft_p50_s"],
        "ttft_p99_s": summary["ttft_p99_s"],
        "requests_s": len(metrics.requests) / summary["duration_s"],
        "duration_s": summary["duration_s"],
        "warmup_s": warmup_s,
    }


def make_engine(cell: Mapping[str, Any], bench: Bench) -> HeadEngine:
    """An engine whose pool holds ``full_rows`` whole caches of the longest context."""
    return bench.head_engine(
        cell["system"],
        evicted=cell["evicted"],
        group_size=cell["group_size"],
        patience=cell["patience"],
        pool_bytes=cell["full_rows"] * bench.whole_bytes(bench.fields["max_context"]),
    )


def _conversations(
    cell: Mapping[str, Any], bench: Bench, n: int, name: str
) -> dict[str, list[np.ndarray]]:
    """Prompts of each conversation; the first is its context and a question."""
    rng = np.random.default_rng(cell["seed"])
    later = [cell["question_tokens"]] * (cell["turns"] - 1)
    return {
        f"{name}-{i}": [
            rng.integers(0, bench.loaded.model.vocabulary, size)
            for size in (cell["context_tokens"], *later)
        ]
        for i in range(n)
    }


def _converse(
    engine: HeadEngine, conversations: Mapping[str, Sequence[np.ndarray]], n_new: int
) -> dict[str, Any]:
    """Serves conversations to their ends and forgets them; the figures of ``measure_throughput``."""
    prompts = {name: deque(turns) for name, turns in conversations.items()}
    asked: dict[str, float] = {}
    waited: list[float] = []
    running: list[int] = []
    answers: dict[str, list[int]] = {}

    def ask(name: str) -> None:
        turn = f"{name} {len(prompts[name])}"
        engine.submit(Request(turn, prompts[name].popleft(), n_new), conversation=name)
        asked[turn] = time.perf_counter()

    begin = time.perf_counter()
    for name in prompts:
        ask(name)
    while engine.has_work:
        events = engine.step()
        running.append(len(engine.scheduler.running) + sum(event.finished for event in events))
        for event in events:
            if event.id not in answers:
                waited.append(time.perf_counter() - asked[event.id])
            answers.setdefault(event.id, []).extend(event.tokens)
            if event.finished and prompts[name := event.id.rpartition(" ")[0]]:
                ask(name)
    seconds = time.perf_counter() - begin
    for name in prompts:
        engine.end_conversation(name)
    return {
        "requests_s": len(answers) / seconds,
        "tokens_s": sum(map(len, answers.values())) / seconds,
        "rows_peak": max(running),
        "rows_mean": float(np.mean(running)),
        "ttft_mean_s": float(np.mean(waited)),
        "duration_s": seconds,
        "answers": answers,
    }
