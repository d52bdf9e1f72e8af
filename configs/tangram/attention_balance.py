"""Figures 5 and 13: decode attention of all layers over heads of different lengths, four ways to balance.

    python -m experiments.tangram_attention --config=configs/tangram/attention_balance.py \\
        --config.profile=FILE.npz
    python -m experiments.tangram_attention --config=configs/tangram/attention_balance.py:smoke

FILE is ``profile.npz`` of ``tools/head_group_clustering/cluster_maps/fastkvzip/qwen3-4b-instruct-2507`` in
github.com/aiha-lab/TANGRAM (Apache-2.0); of other models its fractions are resampled. Without one they are
made up. 37 seconds on one H200, 75 for ``bar``; a few seconds in the smoke variant on a CPU. The goal is
``aot`` within 1.08 of ``uniform`` at 100K tokens, batch 4, a quarter kept (the variant ``bar``: that cell and
half kept, every kernel); the paper has one split for all heads at 1.4 to 1.7. Expect ``aot`` at 0.99 to 1.06
from two requests on, and at 1.01 to 1.13 for one, whose longest head has hundreds of parts to merge;
``results/h200/tangram`` says more.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "full") -> ConfigDict:
    if variant not in ("full", "bar", "smoke"):
        raise ValueError(f"There is no variant {variant!r}; choose full, bar or smoke.")
    config = ConfigDict()
    config.models = ("qwen3-4b", "qwen2.5-7b")
    config.profile = ""
    if variant == "bar":
        config.cells = ((100_000, 4, 0.25), (100_000, 4, 0.5))
        config.methods = (
            *("uniform", "static", "planned", "aot", "static:mosaic", "aot:mosaic"),
            *("uniform:mosaic", "split_kv:triton", "split_kv:mosaic"),
        )
    else:
        batches = ((n, b, 0.25) for n in (30_000, 60_000, 100_000) for b in (1, 2, 4, 8))
        config.cells = (*batches, *((100_000, 4, kept) for kept in (0.5, 0.75, 1.0)))
        config.methods = ("uniform", "static", "planned", "aot")
    config.page_size = 16
    config.group_size = 4
    config.scope = "global"
    config.blocks_per_processor = 4
    config.knobs = ConfigDict({"block": 0, "num_warps": 0, "num_stages": 0})
    config.dtype = "bfloat16"
    config.runs = 5
    config.repeats = 5
    config.rest = False
    config.ceiling = (8192, 1 << 31)
    config.bar = 1.08
    config.out = f"out/tangram/attention_balance{'' if variant == 'full' else '_' + variant}"
    if variant == "smoke":
        smoke(config)
    return config


def smoke(config: ConfigDict) -> None:
    """A tiny model, seconds on a CPU: all parts work, no speed is measured."""
    config.models = ("tiny",)
    config.cells = ((96, 2, 0.5), (64, 2, 1.0))
    config.methods = ("uniform", "static", "planned", "aot")
    config.page_size = 4
    config.group_size = 2
    config.blocks_per_processor = 1
    config.dtype = "float32"
    config.runs = 1
    config.repeats = 1
    config.ceiling = (128, 1 << 20)
