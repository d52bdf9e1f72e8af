"""Table 17: what choosing a backend in every step costs, Llama-3.1-8B, P 8K.

    python -m experiments.tables --config=configs/granikv/dispatch_overhead.py
    python -m experiments.tables --config=configs/granikv/dispatch_overhead.py:headline
    python -m experiments.tables --config=configs/granikv/dispatch_overhead.py:smoke

The same steady decode steps with the dispatcher and with its choice forced; the difference is what the
choice costs, and it may come out below the noise of either. B 8 and B 256. About 10 minutes on one H200,
5 for the headline cell (B 256) (estimated, not measured).

Where this differs: the paper measures the CPU time of a Python wrapper (below 1 µs, below 0.2% of a step);
here the choice is made on the device, inside the jitted loop, and no host code runs between steps.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("dispatch_overhead", variant, "Cost of the dispatch, Llama-3.1-8B, P 8K")
    config.picture = "steps"
    config.variants = (
        {"name": "auto", "system": "kvgrain"},
        {"name": "dense", "system": "kvgrain", "backend": "dense"},
        {"name": "cascade", "system": "kvgrain", "backend": "cascade"},
    )
    config.reference = ""
    config.derive = ("dispatch",)
    config.metrics = ("step_ms", "tpot_p99_ms", "dense_percent", "overhead_us", "overhead_percent")
    config.workload.repeats = 30
    config.cells = base.grid(
        "steps", prefix_tokens=8192, batch=256 if variant == "headline" else (8, 256)
    )
    if variant == "smoke":
        base.shrink(config, base.grid("steps", prefix_tokens=64, batch=4))
    return config
