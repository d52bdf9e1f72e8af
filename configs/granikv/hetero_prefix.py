"""Tables 4 and 21: prefixes of different lengths interleaved, Llama-3.1-8B, B 256.

    python -m experiments.tables --config=configs/granikv/hetero_prefix.py
    python -m experiments.tables --config=configs/granikv/hetero_prefix.py:headline
    python -m experiments.tables --config=configs/granikv/hetero_prefix.py:smoke

512 requests under Poisson arrivals at saturation over k 4 prefixes of 2K, 4K, 8K and 16K tokens, or k 8
on a ladder from 1K to 16K with the paper's sum of 53.2K. What all rows have in common is then nothing, so
`cascade16` shares nothing; `kvgrain` reads each prefix once for its own rows. About 6.5 minutes on one
H200, 4.5 for the headline cell (k 4, three repetitions).

Where this differs: the paper gives the ends and the sum of its k 8 ladder, not the steps; ours are 1K,
2K, 3K, 5K, 6K, 8K, 11K and 16K + 205 tokens. User turns as in `sharegpt_llama8b`.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table(
        "hetero_prefix", variant, "Prefixes of different lengths, Llama-3.1-8B, B 256"
    )
    config.paper = ("table21",)
    config.axes = ("classes",)
    config.picture = "bars"
    config.metrics = (*base.SPEEDS, "tpot_p99_ms")
    config.workload.requests = 512
    config.engine.hot_fraction = 0.3
    config.engine.max_context = 17_664
    four = (2048, 4096, 8192, 16384)
    eight = (1024, 2048, 3072, 5120, 6144, 8192, 11264, 16589)
    config.cells = (
        {"how": "poisson", "batch": 256, "classes": 4, "prefix_tokens": four, "repetitions": 3},
        {"how": "poisson", "batch": 256, "classes": 8, "prefix_tokens": eight},
    )
    if variant == "headline":
        config.cells = config.cells[:1]
    if variant == "smoke":
        cell = {"how": "poisson", "batch": 4, "classes": 3, "prefix_tokens": (16, 32, 64)}
        base.shrink(config, [cell])
    return config
