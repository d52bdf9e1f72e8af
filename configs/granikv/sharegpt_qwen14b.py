"""Table 3 and Table 10: throughput under Poisson arrivals at saturation, Qwen2.5-14B.

    python -m experiments.tables --config=configs/granikv/sharegpt_qwen14b.py
    python -m experiments.tables --config=configs/granikv/sharegpt_qwen14b.py:headline
    python -m experiments.tables --config=configs/granikv/sharegpt_qwen14b.py:smoke

Three systems over a ladder of prefixes P and batches B. P 4K, 8K and 16K at B 256 are served: 500
requests over one prefix arrive as a Poisson process of 200/s, three times; the rest of the grid, and
the same cells once more, are steady decode steps, whose B / step leaves prefill out. Expect about
70 minutes on one H200, 30 for the headline cells, compilation included (estimated, not measured).
B 256 over two, served once, took 7. The smoke variant takes seconds on a CPU.

Where this differs: TP 1, on one device; `--config.workload.tp=2` is the paper's, over two (per device it
then needs that part of the memory);
user turns are drawn from a distribution fitted to OpenAssistant's
instead of ShareGPT's (`experiments/table_turns.py`; `--config.workload.turns.path=FILE` takes a file),
and the paper's B 512 and 1,024 are in `concurrency`.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table(
        "sharegpt_qwen14b", variant, "ShareGPT-like turns, Qwen2.5-14B", "qwen2.5-14b"
    )
    config.paper = ("table10",)
    config.axes = ("prefix_tokens", "batch", "tp")
    config.workload.tp = 1
    served = base.grid("poisson", prefix_tokens=(4096, 8192, 16384), batch=256, repetitions=3)
    config.cells = served + base.grid(
        "steps", prefix_tokens=base.P_LADDER, batch=base.B_LADDER, repeats=4
    )
    if variant == "headline":
        config.cells = served
    if variant == "smoke":
        base.shrink(config, base.grid("poisson", prefix_tokens=64, batch=4))
    return config
