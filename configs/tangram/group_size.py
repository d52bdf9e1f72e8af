"""Figure 12: throughput by head group size at 75% eviction.

    python -m experiments.tangram --config=configs/tangram/group_size.py --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/group_size.py:qwen2.5-7b \\
        --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/group_size.py:smoke

FILE as for ``throughput.py``. Variants are ``qwen3-4b`` and ``qwen2.5-7b``. Each group size compiles its own
programs: per model about 3 minutes on one H200 (estimated, not measured).

Where this differs: one question a conversation; the sizes are those that divide all heads of the model
(288 and 112; 64 divides neither); 75% only.
"""

from ml_collections import ConfigDict

from configs.tangram import base

SIZES = {"qwen3-4b": (1, 2, 4, 8, 16, 32), "qwen2.5-7b": (1, 2, 4, 8, 16, 28, 56)}


def get_config(variant: str = base.MODELS[0]) -> ConfigDict:
    config = base.serving("group_size", variant, "Throughput by head group size (Figure 12)")
    config.measure = "throughput"
    config.axes = ("group_size",)
    config.workload = {
        **config.workload,
        "system": "balanced",
        "evicted": 75,
        "conversations": 16,
        "turns": 1,
        "question_tokens": 64,
    }
    config.picture.update(x="group_size", series="system", y=("requests_s", "used_percent"))
    sizes = SIZES.get(variant, (1, 2))
    config.cells = tuple({"group_size": size} for size in sizes)
    if variant == "smoke":
        base.shrink(config, config.cells, conversations=4)
    return config
