"""Table 19: models and tensor-parallel degrees at P 8K, B 256.

    python -m experiments.tables --config=configs/granikv/tp_envelope.py
    python -m experiments.tables --config=configs/granikv/tp_envelope.py:headline
    python -m experiments.tables --config=configs/granikv/tp_envelope.py:smoke

Steady decode steps of each model over 1, 2 and 4 devices. A pair that needs more devices than there are is
listed as not run; with more devices, the same command goes on from there. About 6.5 minutes on one H200
(TP 1 only), 1.6 for the headline cell (Llama-3.1-8B).

Where this differs: TP 1 for the two larger models is ours; the paper's 40 GB did not hold them.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("tp_envelope", variant, "Models and TP degrees, P 8K, B 256", "qwen2.5-32b")
    config.paper = ("table19",)
    config.axes = ("model", "tp")
    config.picture = "steps"
    config.metrics = ("speedup", "step_ms", "tok_s")
    models = ("random:llama-3.1-8b", "random:qwen2.5-14b", "random:qwen2.5-32b")
    if variant == "headline":
        models = models[:1]
        config.memory_gib = base.MEMORY["llama-3.1-8b"]
    config.cells = base.grid("steps", prefix_tokens=8192, batch=256, model=models, tp=1)
    if variant == "full":
        config.cells += base.grid(
            "steps", prefix_tokens=8192, batch=256, model=models[1:], tp=(2, 4)
        )
    if variant == "smoke":
        cells = base.grid("steps", prefix_tokens=64, batch=4, model="random:tiny", tp=(1, 64))
        base.shrink(config, cells)
    return config
