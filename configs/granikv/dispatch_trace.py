"""Table 15: the share of decode steps that take the dense backend, Llama-3.1-8B.

    python -m experiments.tables --config=configs/granikv/dispatch_trace.py
    python -m experiments.tables --config=configs/granikv/dispatch_trace.py:headline
    python -m experiments.tables --config=configs/granikv/dispatch_trace.py:smoke

B requests at once over a prefix of P tokens; every step chooses by its own number of rows. The threshold
is the device's (`kvgrain_jax.attention.dispatch.M_SAT`), so it is not the A100's 1,024 effective rows on
another GPU. About 2.5 minutes on one H200, 1.3 for the headline cells (P 8K).
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table(
        "dispatch_trace", variant, "Steps that take the dense backend, Llama-3.1-8B"
    )
    config.paper = ("table15",)
    config.picture = "dispatch"
    config.variants = base.KVGRAIN
    config.reference = ""
    config.metrics = ("dense_percent", "tok_s", "rows_peak")
    config.workload.turns = {"tokens": 128}
    p = 8192 if variant == "headline" else (512, 2048, 8192, 16384)
    config.cells = base.grid("burst", prefix_tokens=p, batch=base.B_LADDER)
    if variant == "smoke":
        base.shrink(config, base.grid("burst", prefix_tokens=64, batch=4))
        config.workload.turns = {"tokens": 8}
    return config
