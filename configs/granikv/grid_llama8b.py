"""Table 6: the synthetic grid, Llama-3.1-8B.

    python -m experiments.tables --config=configs/granikv/grid_llama8b.py
    python -m experiments.tables --config=configs/granikv/grid_llama8b.py:headline
    python -m experiments.tables --config=configs/granikv/grid_llama8b.py:smoke

B requests over one prefix of P tokens arrive at once, each with 128 tokens of its own, and generate 256
tokens: output tok/s, TPOT, and TTFT measured at the first streamed token, so that P 16K, which the paper
left out for a fault of its measurement, is there as well. About 12 minutes on one H200 (estimated, not
measured), 3 for the headline cells (B 256, P 4K to 16K), compilation included.

Where this differs: one repetition instead of three. The paper does not
say how long its requests' own prompts are.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("grid_llama8b", variant, "Synthetic grid, Llama-3.1-8B", "llama-3.1-8b")
    config.paper = ("table06",)
    config.workload.turns = {"tokens": 128}
    config.cells = base.grid("burst", prefix_tokens=base.P_LADDER, batch=base.B_LADDER)
    if variant == "headline":
        config.cells = base.grid("burst", prefix_tokens=(4096, 8192, 16384), batch=256)
    if variant == "smoke":
        base.shrink(config, base.grid("burst", prefix_tokens=(32, 64), batch=4))
        config.workload.turns = {"tokens": 8}
    return config
