"""Times the prefill of one prompt at a time: enters a cell and a bench, leaves the parts of Figure 11.

Static budgets take exactly the pages that will be used and give none back. The dynamic baseline takes
those of the whole prompt, then chooses, moves and gives back (``kvgrain_jax.budgets.dynamic``).
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.tangram_serving import make_engine
from experiments.tangram_systems import Bench
from kvgrain_jax.budgets.dynamic import DynamicEngine
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.engine import Request


def measure_prefill(cell: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """Prefills ``repeats`` prompts one after another.

    Args:
      cell: ``system``, ``evicted``, ``group_size``, ``context_tokens``, ``repeats``, ``full_rows``;
        ``scorer`` where it is not that of the engine.
      bench: model and budgets.

    Returns:
      Medians in ms: ``total_ms``; its parts ``allocation_ms``, ``model_ms``, ``eviction_ms``,
      ``reclaim_ms``; ``pages_reclaimed`` of one prompt before it ends; ``footprint_mib`` of its
      pages after its prefill; ``warmup_s``.
    """
    if "scorer" in cell:
        bench = Bench(bench.loaded, bench.demands, {**bench.fields, "scorer": cell["scorer"]})
    engine = make_engine(cell, bench)
    rng = np.random.default_rng(cell["seed"])
    prompts = rng.integers(
        0, bench.loaded.model.vocabulary, (cell["repeats"] + 1, cell["context_tokens"])
    )
    begin = time.perf_counter()
    _prefill(engine, "warm", prompts[0])
    warmup_s = time.perf_counter() - begin
    parts = [_prefill(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts[1:])]
    return {name: float(np.median([part[name] for part in parts])) for name in parts[0]} | {
        "warmup_s": warmup_s
    }


def _prefill(engine: HeadEngine, name: str, prompt: np.ndarray) -> dict[str, float]:
    """Times one prompt until its first token."""
    before = _reclaimed(engine)
    jax.block_until_ready(engine.ledger.kv.k)
    begin = time.perf_counter()
    engine.submit(Request(name, prompt, 2))
    engine.scheduler.admit()
    jax.block_until_ready(engine.ledger.kv.k)
    admitted = time.perf_counter()
    while not engine.prefill():
        pass
    jax.block_until_ready(engine.ledger.kv.k)
    end = time.perf_counter()
    footprint = engine.ledger.allocated_bytes
    engine.abort(name)
    eviction, reclaim, pages = (b - a for a, b in zip(before, _reclaimed(engine), strict=True))
    parts = {
        "total_ms": end - begin,
        "allocation_ms": admitted - begin,
        "model_ms": end - admitted - eviction - reclaim,
        "eviction_ms": eviction,
        "reclaim_ms": reclaim,
    }
    return {key: 1000 * seconds for key, seconds in parts.items()} | {
        "pages_reclaimed": pages,
        "footprint_mib": footprint / 2**20,
    }


def _reclaimed(engine: HeadEngine) -> tuple[float, float, int]:
    """Seconds of eviction and of reclaim, and pages, of all requests so far."""
    if not isinstance(engine, DynamicEngine):
        return 0.0, 0.0, 0
    return engine.times.eviction, engine.times.reclaim, engine.times.pages
