"""Table 20: k distinct prefixes of 8K tokens, Llama-3.1-8B, B 256.

    python -m experiments.tables --config=configs/granikv/multi_prefix.py
    python -m experiments.tables --config=configs/granikv/multi_prefix.py:headline
    python -m experiments.tables --config=configs/granikv/multi_prefix.py:smoke

500 requests under Poisson arrivals at saturation, each over one of k prefixes. The pool holds what the
paper's A100-40GB had beside the weights, 148,480 tokens, so that k 64 (512K tokens of prefixes) exceeds it
as it does there and every system computes prefixes again and again; 128 requests, two for each, show that.
Beyond the paper, `cached-first` is `kvgrain` with requests whose prefix is still cached before those that came
first (`EngineConfig.patience`), for k 16 and 64; not measured on a GPU yet.
About 11 minutes on one H200, 3 for the headline cells (k 1 and 4).

Where this differs: one repetition instead of three; requests take the prefixes in turns.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table(
        "multi_prefix", variant, "k distinct prefixes of 8K tokens, Llama-3.1-8B, B 256"
    )
    config.paper = ("table20",)
    config.variants += ({"name": "cached-first", "system": "kvgrain", "patience": 64},)
    config.axes = ("classes",)
    config.picture = "classes"
    config.engine.pool_tokens = base.PAPER_POOL_TOKENS
    config.engine.hot_fraction = 0.3
    config.engine.max_context = 9216
    systems = [system["name"] for system in base.SYSTEMS]
    config.cells = base.grid(
        "poisson", prefix_tokens=8192, batch=256, classes=(1, 4), variants=systems
    )
    if variant == "full":
        config.cells += base.grid("poisson", prefix_tokens=8192, batch=256, classes=(16, 64))
        config.cells[-1].update(requests=128)
    if variant == "smoke":
        base.shrink(config, base.grid("poisson", prefix_tokens=64, batch=4, classes=(1, 3)))
    return config
