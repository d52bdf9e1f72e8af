"""Table 7: the synthetic grid, Qwen2.5-14B.

    python -m experiments.tables --config=configs/granikv/grid_qwen14b.py
    python -m experiments.tables --config=configs/granikv/grid_qwen14b.py:headline
    python -m experiments.tables --config=configs/granikv/grid_qwen14b.py:smoke

B requests over one prefix of P tokens arrive at once, each with 128 tokens of its own, and generate 256
tokens: output tok/s, TPOT, and TTFT measured at the first streamed token, so that P 16K, which the paper
left out for a fault of its measurement, is there as well. About 35 minutes on one H200, 15 for the
headline cells (B 256, P 4K to 16K), compilation included (estimated, not measured).

Where this differs: TP 1 (`--config.workload.tp=2` is the paper's); one repetition instead of three. The paper does not
say how long its requests' own prompts are.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("grid_qwen14b", variant, "Synthetic grid, Qwen2.5-14B", "qwen2.5-14b")
    config.paper = ("table07",)
    config.workload.tp = 1
    config.workload.turns = {"tokens": 128}
    config.cells = base.grid("burst", prefix_tokens=base.P_LADDER, batch=base.B_LADDER)
    if variant == "headline":
        config.cells = base.grid("burst", prefix_tokens=(4096, 8192, 16384), batch=256)
    if variant == "smoke":
        base.shrink(config, base.grid("burst", prefix_tokens=64, batch=4))
        config.workload.turns = {"tokens": 8}
    return config
