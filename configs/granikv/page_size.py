"""Table 18: COLD pages of 1, 4 and 16 tokens, Llama-3.1-8B, P 8K, B 256.

    python -m experiments.tables --config=configs/granikv/page_size.py
    python -m experiments.tables --config=configs/granikv/page_size.py:headline
    python -m experiments.tables --config=configs/granikv/page_size.py:smoke

`kvgrain` with COLD pages of each size, HOT and everything else the same: 256 requests at once, three
times, and steady decode steps. 3 minutes on one H200, 2 for the headline cell (steps only).
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("page_size", variant, "COLD page size, Llama-3.1-8B, P 8K, B 256")
    config.paper = ("table18",)
    config.picture = "bars"
    sizes = (1, 16) if variant == "smoke" else (1, 4, 16)
    config.variants = tuple(
        {"name": f"page {size}", "system": "kvgrain", "page_size": size} for size in sizes
    )
    config.reference = "page 1"
    config.metrics = ("tok_s", "speedup", "tpot_p50_ms", "cold_peak")
    config.workload.turns = {"tokens": 128}
    served = base.grid("burst", prefix_tokens=8192, batch=256, repetitions=3)
    config.cells = base.grid("steps", prefix_tokens=8192, batch=256)
    if variant == "full":
        config.cells = config.cells + served
    if variant == "smoke":
        base.shrink(config, base.grid("burst", prefix_tokens=64, batch=4))
        config.workload.turns = {"tokens": 8}
    return config
