"""Table 12: `kvgrain` at P 16K with 256, 512 and 1,024 rows, Llama-3.1-8B.

    python -m experiments.tables --config=configs/granikv/concurrency.py
    python -m experiments.tables --config=configs/granikv/concurrency.py:headline
    python -m experiments.tables --config=configs/granikv/concurrency.py:smoke

Steady decode steps; B / step is the output throughput without prefill. The pool of 640K tokens takes 80
GiB. About 2.5 minutes on one H200, 1.5 for the headline cells (B 256 and 512).

Where this differs: the paper serves Poisson arrivals; on 40 GB its B 512 and 1,024 cannot all be held at
once, here they can.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("concurrency", variant, "Concurrency at P 16K, Llama-3.1-8B")
    config.paper = ("table12",)
    config.axes = ("batch",)
    config.picture = "concurrency"
    config.variants = base.KVGRAIN
    config.reference = ""
    config.metrics = ("tok_s", "tpot_p50_ms", "tpot_p99_ms", "dense_percent")
    config.memory_gib = 112
    config.engine.pool_tokens = 655_360
    config.engine.max_batch = 1024
    config.engine.decode_steps = 4
    b = (256, 512) if variant == "headline" else (256, 512, 1024)
    config.cells = base.grid("steps", prefix_tokens=16384, batch=b)
    if variant == "smoke":
        base.shrink(config, base.grid("steps", prefix_tokens=64, batch=4))
    return config
