"""Where the time of a decode step goes, with one variant: enters a unit, leaves shares.

Metrics, per step, as ``experiments.profile.shares`` finds them in a profiler trace: ``attention_ms``,
``matmul_ms``, ``other_ms``, ``collectives_ms``, ``idle_ms``, ``step_ms``; and the first, second, fourth and
fifth as percent of the step: the paper's alpha, the matmuls, beta and gamma.
"""

from collections.abc import Callable
from typing import Any

from experiments import profile
from experiments.decode_grid import Cell
from experiments.table_spec import Unit
from experiments.table_workloads import prefixes
from models import LoadedModel

PARTS = ("attention", "matmul", "other", "collectives", "idle")


def measure(
    unit: Unit, load: Callable[[str, str, int], LoadedModel], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Profiles steady decode steps.

    Raises:
      KVGrainError: the rows do not fit the engine.
    """
    cell, config = unit.cell, unit.engine
    assert config is not None
    model = load(unit.model, unit.dtype, cell["tp"]).model
    progress("profiling")
    found = profile.shares(
        model,
        config,
        Cell(prefixes(cell), cell["batch"]),
        suffix_tokens=cell["suffix_tokens"],
        n_steps=config.decode_steps,
    )
    step = found["step_ms"]
    shares = {f"{part}_percent": 100 * found[f"{part}_ms"] / step for part in PARTS} if step else {}
    return {"metrics": {**found, **shares}}
