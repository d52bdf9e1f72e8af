"""Tables 13, 14 and 22: kernel-time shares, and Amdahl's prediction against the measured speed-up.

    python -m experiments.tables --config=configs/granikv/amdahl.py
    python -m experiments.tables --config=configs/granikv/amdahl.py:headline
    python -m experiments.tables --config=configs/granikv/amdahl.py:smoke

A profiler trace of steady decode steps of each system, Llama-3.1-8B, B 256, at P 8K and 16K: alpha is the
attention's share of the baseline's step, beta that of collectives, gamma the idle share. The prediction is
1 / (1 - alpha + alpha / s) with s the speed-up of the attention inside the engine; it is compared with the
ratio of the steps. About 2 minutes on one H200, 1 for the headline cell (P 16K).

Where this differs: TP 1, so beta is 0; s is measured inside the engine, where the paper takes that of
the isolated kernel (15.6) and derives the other.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("amdahl", variant, "Shares of a decode step, Llama-3.1-8B, B 256")
    config.paper = ("table13", "table22")
    config.picture = "shares"
    config.derive = ("amdahl",)
    config.metrics = (
        "step_ms",
        "attention_percent",
        "matmul_percent",
        "other_percent",
        "collectives_percent",
        "idle_percent",
        "s_attention",
        "speedup_predicted",
        "speedup",
    )
    p = 16384 if variant == "headline" else (8192, 16384)
    config.cells = base.grid("profile", prefix_tokens=p, batch=256)
    if variant == "smoke":
        base.shrink(config, base.grid("profile", prefix_tokens=64, batch=4))
        config.variants = (base.SYSTEMS[0], base.SYSTEMS[-1])
    return config
