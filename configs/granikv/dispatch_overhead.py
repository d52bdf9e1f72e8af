"""Table 17: what choosing a backend in every step costs, Llama-3.1-8B, P 8K.

    python -m experiments.tables --config=configs/granikv/dispatch_overhead.py
    python -m experiments.tables --config=configs/granikv/dispatch_overhead.py:headline
    python -m experiments.tables --config=configs/granikv/dispatch_overhead.py:smoke

The same steady decode steps with the dispatcher and with its choice forced. Both engines hold their batch
at once and take turns; the cost is the median difference of 40 pairs of turns, of 8 steps each, with its
95% interval. B 8 and B 256. About 2.5 minutes on one H200, 1 for the headline cell (B 256).

Where this differs: the paper measures the CPU time of a Python wrapper (below 1 µs, below 0.2% of a step);
here the choice is made on the device, inside the jitted loop. What is measured is all that differs: the
branches of the loop, and the host's record after each turn of why a step took its backend.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("dispatch_overhead", variant, "Cost of the dispatch, Llama-3.1-8B, P 8K")
    config.picture = "paired"
    config.variants = ({"name": "auto", "system": "kvgrain"},)
    config.reference = ""
    config.metrics = (
        *("step_ms", "forced_ms", "dense_percent", "overhead_us", "overhead_low_us"),
        *("overhead_high_us", "overhead_percent", "overhead_bound_percent"),
    )
    config.workload.repeats = 40
    config.workload.suffix_tokens = 128
    # Two pools, each with P and 256 rows of up to 673 tokens.
    config.engine.pool_tokens = 196_608
    config.memory_gib = 76
    config.cells = base.grid(
        "paired", prefix_tokens=8192, batch=256 if variant == "headline" else (8, 256)
    )
    if variant == "smoke":
        base.shrink(config, base.grid("paired", prefix_tokens=64, batch=4))
    return config
