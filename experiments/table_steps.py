"""Times steady decode steps of a full batch with one variant: enters a unit, leaves metrics.

Fields of a cell: ``prefix_tokens``, ``classes`` and ``batch`` as in ``experiments.table_workloads``;
``suffix_tokens`` of each row when the clock starts, at least; ``steps`` of one turn, ``repeats`` turns.

Metrics: ``tok_s`` is B / step; ``tpot_p50_ms`` and ``tpot_p99_ms`` the median and the 99th percentile of
a step over turns; ``step_ms`` the median again; ``dense_percent`` as in ``experiments.table_serving``;
``m_eff`` rows times query heads of a KV head. Prefill and compilation are not timed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments import decode_step
from experiments.table_spec import Unit
from experiments.table_workloads import prefixes
from kvgrain_jax.engine import Engine
from models import LoadedModel


def measure(
    unit: Unit, load: Callable[[str, str, int], LoadedModel], progress: Callable[[str], None]
) -> dict[str, Any] | None:
    """Times the steps.

    Raises:
      KVGrainError: the rows do not fit the engine.
    """
    cell, config = unit.cell, unit.engine
    assert config is not None
    model = load(unit.model, unit.dtype, unit.cell["tp"]).model
    sizes = step_sizes(unit)
    try:
        progress("compiling and computing the prompts")
        engine = decode_step.ready_engine(model, config, sizes)
        engine.metrics.steps.clear()
        turns = []
        for turn in range(cell["repeats"]):
            progress(f"{turn}/{cell['repeats']} turns")
            turns.append(decode_step.time_turn(engine, sizes) * 1000)
    except KeyboardInterrupt:
        return None
    median, high = np.percentile(turns, [50, 99])
    return {
        "metrics": {
            "tok_s": cell["batch"] / median * 1000,
            "tpot_p50_ms": median,
            "tpot_p99_ms": high,
            "step_ms": median,
            "dense_percent": dense_percent(engine),
            "m_eff": engine.metrics.steps[-1].m_eff,
        },
        "series": {"tpot_ms": turns},
    }


def step_sizes(unit: Unit) -> dict[str, Any]:
    """What ``decode_step.ready_engine`` and ``decode_step.time_turn`` take of a unit."""
    cell, config = unit.cell, unit.engine
    assert config is not None
    return {
        "prefix_tokens": prefixes(cell),
        "batch": cell["batch"],
        "suffix_tokens": cell["suffix_tokens"],
        "steps": config.decode_steps,
        "repeats": cell["repeats"],
        "engine": {
            "chunk_tokens": config.chunk_tokens,
            "chunk_requests": config.chunk_requests,
            "prefill_decode_steps": config.prefill_decode_steps,
        },
    }


def dense_percent(engine: Engine) -> float:
    """The metric of that name, over the steps that the engine has kept."""
    steps = engine.metrics.steps
    return 100 * sum(step.backend == "dense" for step in steps) / len(steps)
