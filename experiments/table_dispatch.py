"""What it costs to choose a backend in every step: enters a unit, leaves metrics.

Two engines hold the same batch at once: that of the unit, which dispatches, and one that is compiled for
the backend taken there and no other. They take turns, there and back. Turns of the same number are a
pair: their rows are equally long, and they ran a moment apart, so that whatever is slow meets both. The
cost is the median difference of the pairs, with its 95% interval.

Fields of a cell: as in ``experiments.table_steps``.

Metrics: ``step_ms`` and ``forced_ms``, the medians with and without the choice; ``overhead_us``,
``overhead_low_us`` and ``overhead_high_us``, the cost of a step and its interval; ``overhead_percent`` of
the step without the choice; ``overhead_bound_percent``, the end of the interval that is farther from
none; ``dense_percent`` as in ``experiments.table_serving``.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import decode_step
from experiments.table_spec import Unit
from experiments.table_steps import dense_percent, step_sizes
from models import LoadedModel

CONFIDENCE = 0.95


def measure(
    unit: Unit, load: Callable[[str, str, int], LoadedModel], progress: Callable[[str], None]
) -> dict[str, Any] | None:
    """Times the pairs of turns.

    Raises:
      KVGrainError: the rows do not fit the engine.
    """
    config = unit.engine
    assert config is not None
    model = load(unit.model, unit.dtype, unit.cell["tp"]).model
    sizes = step_sizes(unit)
    try:
        progress("compiling and computing the prompts")
        auto = decode_step.ready_engine(model, config, sizes)
        backend = auto.metrics.steps[-1].backend
        auto.metrics.steps.clear()
        progress(f"the same for {backend} alone")
        forced_config = dataclasses.replace(config, backend=backend)
        forced = decode_step.ready_engine(model, forced_config, sizes)
        engines = {"auto": auto, "forced": forced}
        times = decode_step.take_turns(
            engines, sizes, lambda turn: progress(f"{turn}/{sizes['repeats']} turns of each")
        )
    except KeyboardInterrupt:
        return None
    return {
        "metrics": {
            **overhead(times["auto"], times["forced"]),
            "dense_percent": dense_percent(auto),
        },
        "series": {f"{name}_ms": [1000 * s for s in turns] for name, turns in times.items()},
    }


def overhead(auto: Sequence[float], forced: Sequence[float]) -> dict[str, float]:
    """The metrics of pairs.

    Args:
      auto: seconds of a step in each turn of the engine that chooses.
      forced: the same where nothing is chosen.
    """
    without = float(np.median(forced))
    differences = np.subtract(auto, forced)
    low, median, high = (1e6 * value for value in median_interval(differences.tolist()))
    percent = 1e-4 / without  # of one microsecond
    return {
        "step_ms": 1000 * float(np.median(auto)),
        "forced_ms": 1000 * without,
        "overhead_us": median,
        "overhead_low_us": low,
        "overhead_high_us": high,
        "overhead_percent": percent * median,
        "overhead_bound_percent": percent * max(abs(low), abs(high)),
    }


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the ends of its 95% interval: low, median, high.

    The ends are values of the sample, by the sign test: how many of them lie below the true median is
    binomial, whatever they are distributed like. Less than six values have no such interval; their
    range stands for it. Source: Conover, Practical Nonparametric Statistics, 3.2.
    """
    ordered = sorted(values)
    n = len(ordered)
    at_most = itertools.accumulate(math.comb(n, below) for below in range(n // 2))
    outside = sum(2 * count <= (1 - CONFIDENCE) * 2**n for count in at_most)
    end = max(outside - 1, 0)
    return ordered[end], float(np.median(ordered)), ordered[n - 1 - end]
