"""Table 24: the HOT share f_p of the pool, Llama-3.1-8B, P 8K, B 256.

    python -m experiments.tables --config=configs/granikv/hot_fraction.py
    python -m experiments.tables --config=configs/granikv/hot_fraction.py:headline
    python -m experiments.tables --config=configs/granikv/hot_fraction.py:smoke

The pool holds 148,480 tokens as in the paper, so that at f_p 0.05 HOT (7,424 tokens) is smaller than the
prefix, which then goes to consecutive pages of COLD, and at f_p 0.8 suffixes run on what HOT lends. 256
requests at once, three times. About 4 minutes on one H200 (estimated, not measured); 2 for the headline
variant, which has f_p 0.05, 0.2 and 0.8 once.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("hot_fraction", variant, "HOT share of the pool, Llama-3.1-8B, P 8K, B 256")
    config.paper = ("table24",)
    config.picture = "pools"
    shares = (0.05, 0.2, 0.8) if variant == "headline" else (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
    shares = (0.05, 0.8) if variant == "smoke" else shares
    config.variants = (
        *({"name": f"f_p {f:g}", "system": "kvgrain", "hot_fraction": f} for f in shares),
        {"name": "cascade16", "system": "cascade16"},
    )
    config.reference = "cascade16"
    config.metrics = (
        "tok_s",
        "speedup",
        "tpot_p50_ms",
        "tpot_p99_ms",
        "ttft_p50_s",
        "hot_peak",
        "lent_peak",
        "cold_prefix_peak",
        "rows_peak",
    )
    config.workload.turns = {"tokens": 128}
    config.engine.pool_tokens = base.PAPER_POOL_TOKENS
    config.engine.max_context = 9216
    repetitions = 1 if variant == "headline" else 3
    config.cells = base.grid("burst", prefix_tokens=8192, batch=256, repetitions=repetitions)
    if variant == "smoke":
        # HOT of 51 tokens cannot hold the prefix; HOT of 819 lends to COLD, which has 205.
        base.shrink(config, base.grid("burst", prefix_tokens=64, batch=4))
        config.workload.turns = {"tokens": 60}
    return config
