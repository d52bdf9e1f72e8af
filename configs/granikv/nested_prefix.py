"""Beyond the paper: system prompt, persona and history as nested segments, against one class a row.

    python -m experiments.tables --config=configs/granikv/nested_prefix.py
    python -m experiments.tables --config=configs/granikv/nested_prefix.py:headline
    python -m experiments.tables --config=configs/granikv/nested_prefix.py:smoke

64 requests at once; every prompt is a system prompt of 8K tokens that all share, one of 4 personas of 1K,
a history of 1K of its own, and a user turn. `nested`: these texts are shared level by level, and a decode
step reads each of them once for the rows that have it. `flat`: lengths are the same, but every prompt is a
text of its own, so there is one class a row and nothing to share. About 3 minutes on one H200, 1.3
for the headline variant (`kvgrain` only); the flat prompts take 86 GiB.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("nested_prefix", variant, "Nested segments against one class a row, B 64")
    config.axes = ("sharing",)
    config.picture = "sharing"
    config.metrics = (
        "tok_s",
        "speedup",
        "tpot_p50_ms",
        "ttft_p50_s",
        "hit_percent",
        "prefix_mib_step",
        "hot_peak",
        "cold_prefix_peak",
        "dense_percent",
        "rows_peak",
    )
    config.memory_gib = 122
    config.engine.pool_tokens = 720_896
    config.engine.hot_fraction = 0.95
    config.engine.max_context = 11_264
    config.engine.max_batch = 64
    config.engine.max_segments = 128
    if variant == "headline":
        config.variants = base.KVGRAIN
        config.reference = ""
    levels = ((8192, 1), (1024, 4), (1024, 0))
    config.cells = base.grid("burst", batch=64, sharing=("nested", "flat"))
    config.cells = tuple({**cell, "levels": levels} for cell in config.cells)
    if variant == "smoke":
        levels = ((64, 1), (16, 2), (16, 0))
        cells = [{**cell, "levels": levels, "batch": 4} for cell in config.cells]
        base.shrink(config, cells, min_hot_tokens=8)
    return config
