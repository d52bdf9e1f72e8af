"""Table 16: where the dense backend overtakes the cascade backend, Llama-3.1-8B, P 8K.

    python -m experiments.tables --config=configs/granikv/dispatch_fit.py
    python -m experiments.tables --config=configs/granikv/dispatch_fit.py:headline
    python -m experiments.tables --config=configs/granikv/dispatch_fit.py:smoke

Steady decode steps with each backend forced, over B 1 to 256; M_eff is B times the 4 query heads of a
KV head. The dispatcher's threshold for a device is the M_eff from which the ratio stays below 1. About
4 minutes on one H200 (estimated, not measured); 1, where programs were compiled before, for the headline
variant (B 8 to 256, as in the paper).
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table(
        "dispatch_fit", variant, "Dense against cascade backend, Llama-3.1-8B, P 8K"
    )
    config.paper = ("table16",)
    config.axes = ("batch",)
    config.picture = "crossover"
    config.variants = (
        {"name": "cascade", "system": "kvgrain", "backend": "cascade"},
        {"name": "dense", "system": "kvgrain", "backend": "dense"},
    )
    config.reference = ""
    config.derive = ("dense_over_cascade",)
    config.metrics = ("m_eff", "tpot_p50_ms", "tpot_p99_ms", "to_cascade")
    b = base.B_LADDER if variant == "headline" else (1, 4, 8, 16, 32, 64, 128, 256)
    config.cells = base.grid("steps", prefix_tokens=8192, batch=b)
    if variant == "smoke":
        base.shrink(config, base.grid("steps", prefix_tokens=64, batch=4))
    return config
