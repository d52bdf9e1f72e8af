"""Where the time of a decode step goes, with one variant: enters a unit, leaves shares.

Metrics, per step, as ``experiments.profile.per_step`` finds them in a profiler trace: ``attention_ms``,
``matmul_ms``, ``other_ms``, ``collectives_ms``, ``idle_ms`` and ``launch_ms`` of it, ``step_ms``; the first five
also as percent of the step: attention is the paper's alpha, collectives its beta, idle its gamma.
``longest_wait_ms`` is the longest single gap. Series: ``waits``, the longest gaps, as
``[kernel before, kernel after, milliseconds]``.
"""

from collections.abc import Callable
from typing import Any

from experiments import profile
from experiments.decode_cells import Cell
from experiments.device_trace import KINDS
from experiments.table_spec import Unit
from experiments.table_workloads import prefixes
from models import LoadedModel

PARTS = (*KINDS, "idle")
WAITS = 12


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
    step = profile.per_step(found, config.decode_steps)
    whole = step["step_ms"]
    shares = (
        {f"{part}_percent": 100 * step[f"{part}_ms"] / whole for part in PARTS} if whole else {}
    )
    return {
        "metrics": {
            **step,
            **shares,
            "longest_wait_ms": max((ms for *_, ms in found.waits), default=0.0),
        },
        "series": {"waits": found.waits[:WAITS]},
    }
