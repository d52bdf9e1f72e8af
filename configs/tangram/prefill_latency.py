"""Figure 11: parts of the prefill latency, static budgets beside compress and reclaim.

    python -m experiments.tangram --config=configs/tangram/prefill_latency.py --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/prefill_latency.py:qwen2.5-7b \\
        --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/prefill_latency.py:smoke

FILE as for ``throughput.py``. Variants are ``qwen3-4b`` and ``qwen2.5-7b``. Qwen2.5-7B takes 71 seconds on
one H200. Expect static budgets to reclaim nothing.

``full`` compresses nothing. Eviction of static budgets happens inside the model's program and is part of
its time. The row with ``key_norm`` has a scorer that costs next to nothing: what separates it from
``snapkv`` is the scorer. Static budgets attend to what is kept only, so they can be faster than ``full``.

Where this differs: the paper's dynamic allocation reclaims pages in vLLM's block manager on the CPU; here
one call on the device gives them back, and what remains is finding out which they are.
"""

from ml_collections import ConfigDict

from configs.tangram import base


def get_config(variant: str = base.MODELS[0]) -> ConfigDict:
    title = "Prefill latency by compression rate (Figure 11)"
    config = base.serving("prefill_latency", variant, title)
    config.measure = "prefill"
    config.axes = ("system", "evicted", "scorer")
    config.workload = {**config.workload, "scorer": "snapkv", "repeats": 3}
    config.picture.stack = ("model_ms", "allocation_ms", "eviction_ms", "reclaim_ms")
    config.cells = _cells((25, 50, 75))
    if variant == "smoke":
        base.shrink(config, _cells((75,))[:-1], repeats=1, scorer="key_norm")
    return config


def _cells(rates: tuple[int, ...]) -> tuple[dict, ...]:
    both = tuple(
        {"system": system, "evicted": rate} for rate in rates for system in ("balanced", "dynamic")
    )
    cheap = {"system": "balanced", "evicted": rates[-1], "scorer": "key_norm"}
    return ({"system": "full", "evicted": 0}, *both, cheap)
