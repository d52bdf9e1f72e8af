"""Table 1: what planning the parts on the host for each layer takes of a decode step.

    python -m experiments.tangram_attention --config=configs/tangram/planning_overhead.py \\
        --config.profile=FILE.npz
    python -m experiments.tangram_attention --config=configs/tangram/planning_overhead.py:smoke

FILE as in ``attention_balance.py``. Random weights, 100K tokens, batch 4, a quarter kept. The paper has
5.6 ms for 28 layers and 6.5 ms for 32, 20% and 17% of a step, by FlashInfer's planner on its host; here
the planner is NumPy. Half a minute on one H200, seconds in the smoke variant. Expect 6.8 and 8.9 ms, 38% and
40% of a step that planning and upload make nearly three times as long; nothing with the table.
"""

from ml_collections import ConfigDict

from configs.tangram import attention_balance


def get_config(variant: str = "full") -> ConfigDict:
    config = attention_balance.get_config("smoke" if variant == "smoke" else "bar")
    config.methods = ("uniform", "planned", "aot")
    config.cells = ((96, 2, 0.5),) if variant == "smoke" else ((100_000, 4, 0.25),)
    if variant != "smoke":
        config.models = ("qwen2.5-7b", "llama-3.1-8b")
    config.rest = True
    config.out = f"out/tangram/planning_overhead{'_smoke' if variant == 'smoke' else ''}"
    return config
