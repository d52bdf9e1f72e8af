"""Both axes: a shared prefix compressed once, beside GraniKV alone and Tangram alone.

    python -m experiments.tangram --config=configs/tangram/both_axes.py --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/both_axes.py:qwen2.5-7b \\
        --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/both_axes.py:demo
    python -m experiments.tangram --config=configs/tangram/both_axes.py:smoke

FILE as for ``throughput.py``. Variants are ``qwen3-4b`` and ``qwen2.5-7b``: 16 requests with suffixes of 128
tokens behind one prefix of 16K, 75% evicted, 2.7 minutes on one H200 for Qwen2.5-7B; and
``demo``: two questions to each of four agents on SmolLM2-135M-Instruct, half of each system prompt kept,
six minutes on two busy CPU cores. Expect ``shared`` to hold least and, on a GPU, to be as
fast as ``granikv``.

The paper has no such system. ``same tokens`` compares answers with those of the whole cache, and says
something about accuracy in ``demo`` only, where the weights are real.
"""

import pathlib

from ml_collections import ConfigDict

from configs.tangram import base


def get_config(variant: str = base.MODELS[0]) -> ConfigDict:
    demo = variant == "demo"
    config = base.serving("both_axes", "smoke" if demo else variant, "Both axes at once")
    config.measure = "axes"
    config.axes = ("system",)
    config.picture.update(x="system", y=("kv_mib", "step_ms"))
    config.workload = {
        **config.workload,
        "loops": 4,
        "requests": _synthetic(
            requests=16, prefix_tokens=base.CONTEXT, suffix_tokens=128, output=256
        ),
    }
    config.cells = _cells(75)
    if variant == "smoke":
        requests = _synthetic(requests=4, prefix_tokens=96, suffix_tokens=8, output=12)
        base.shrink(config, _cells(75), requests=requests, loops=2)
    if demo:
        _shrink_to_demo(config)
    return config


def _shrink_to_demo(config: base.Config) -> None:
    folder = pathlib.Path(__file__).parents[1] / "agents"
    agents = {
        "kind": "agents",
        "folder": str(folder),
        "agents": ("cook", "tutor", "support", "analyst"),
        "requests": 8,
        "output_tokens": 24,
    }
    base.shrink(config, _cells(50), requests=agents, loops=1, group_size=3)
    config.title = "Both axes at once, SmolLM2-135M-Instruct"
    config.notes = (
        "real weights, real text; prefixes are compressed before a question is seen",
        "on a CPU runs are read tile by tile in a loop, which tells nothing of a GPU's step time",
    )
    config.model = "smollm2-135m"
    config.profile.update(sinks=4, window=28)
    config.engine.update(
        scorer="snapkv",
        page_size=16,
        slab_align=64,
        max_context=1536,
        chunk_tokens=128,
        chunk_buckets=(128,),
        decode_steps=4,
    )
    config.out = "out/tangram/both_axes_demo"


def _cells(evicted: int) -> tuple[dict, ...]:
    rates = {"granikv": 0, "balanced": evicted, "shared": evicted}
    return tuple({"system": name, "evicted": rate} for name, rate in rates.items())


def _synthetic(*, output: int, **fields: int) -> dict:
    return {"kind": "synthetic", "output_tokens": output, **fields}
