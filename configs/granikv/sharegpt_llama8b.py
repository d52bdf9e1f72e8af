"""Table 3 and Table 9: throughput under Poisson arrivals at saturation, Llama-3.1-8B.

    python -m experiments.tables --config=configs/granikv/sharegpt_llama8b.py
    python -m experiments.tables --config=configs/granikv/sharegpt_llama8b.py:headline
    python -m experiments.tables --config=configs/granikv/sharegpt_llama8b.py:smoke

Three systems over a ladder of prefixes P and batches B. P 4K, 8K and 16K at B 256 are served: 500
requests over one prefix arrive as a Poisson process of 200/s, three times; the rest of the grid, and
the same cells once more, are steady decode steps, whose B / step leaves prefill out. About
17 minutes on one H200, 11 for the headline cells, compilation included; the smoke variant takes
seconds on a CPU.

Where this differs: user turns are drawn from a distribution fitted to OpenAssistant's
instead of ShareGPT's (`experiments/table_turns.py`; `--config.workload.turns.path=FILE` takes a file),
and the paper's B 512 and 1,024 are in `concurrency`.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table(
        "sharegpt_llama8b", variant, "ShareGPT-like turns, Llama-3.1-8B", "llama-3.1-8b"
    )
    config.paper = ("table09",)
    served = base.grid("poisson", prefix_tokens=(4096, 8192, 16384), batch=256, repetitions=3)
    config.cells = served + base.grid(
        "steps", prefix_tokens=base.P_LADDER, batch=base.B_LADDER, repeats=4
    )
    if variant == "headline":
        config.cells = served
    if variant == "smoke":
        cells = base.grid("poisson", prefix_tokens=(32, 64), batch=4)
        base.shrink(config, cells + base.grid("steps", prefix_tokens=64, batch=4))
    return config
