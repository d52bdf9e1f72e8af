"""Figure 8: heads of a group against wasted pages and the cost of the page tables, 100K tokens, 25% kept.

    python -m experiments.tangram_attention_pages --config=configs/tangram/page_fragmentation.py \\
        --config.profile=FILE.npz
    python -m experiments.tangram_attention_pages --config=configs/tangram/page_fragmentation.py:smoke

FILE as in ``attention_balance.py``. A minute on a CPU, as long on a GPU. The goal is at most 5% of the
allocated bytes at ``G_h`` 4, groups over all layers.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "full") -> ConfigDict:
    if variant not in ("full", "smoke"):
        raise ValueError(f"There is no variant {variant!r}; choose full or smoke.")
    config = ConfigDict()
    config.models = ("qwen3-4b", "qwen2.5-7b")
    config.profile = ""
    config.context = 100_000
    config.retention = 0.25
    config.group_sizes = (1, 2, 4, 8, 16, 32, 64)
    config.page_size = 16
    config.dtype = "bfloat16"
    config.repeats = 9
    config.bar = 0.05
    config.out = f"out/tangram/page_fragmentation{'_smoke' if variant == 'smoke' else ''}"
    if variant == "smoke":
        config.models = ("tiny",)
        config.context = 96
        config.group_sizes = (1, 2)
        config.page_size = 4
        config.repeats = 1
    return config
