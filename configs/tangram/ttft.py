"""Figure 14: time to first token against request rate, the whole cache against Tangram at 75% eviction.

    python -m experiments.tangram --config=configs/tangram/ttft.py --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/ttft.py:qwen2.5-7b --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/ttft.py:smoke

FILE as for ``throughput.py``. Variants are ``MODEL`` and ``MODEL-headline`` (two rates) for ``qwen3-4b`` and
``qwen2.5-7b``. Per model about 3 minutes on one H200, 1.5 for the headline cells (estimated, not measured).

Where this differs: Poisson arrivals of 16 requests of 8K and 16K tokens with 256 new ones, in a pool of
four whole caches; the paper has 30K tokens on average and gives no pool.
"""

from ml_collections import ConfigDict

from configs.tangram import base


def get_config(variant: str = base.MODELS[0]) -> ConfigDict:
    title = "Time to first token by request rate (Figure 14)"
    config = base.serving("ttft", variant, title, "headline")
    config.measure = "ttft"
    config.axes = ("system", "rate")
    config.workload = {
        **config.workload,
        "context_tokens": (8192, 16_384),
        "requests": 16,
        "output_tokens": 256,
    }
    config.picture.update(x="rate", series="system", y=("ttft_mean_s", "ttft_p99_s"))
    rates = (1.0, 3.0) if variant.endswith("headline") else (0.5, 1.0, 2.0, 3.0)
    config.cells = _cells(rates)
    if variant == "smoke":
        base.shrink(config, _cells((20.0,)), context_tokens=(64, 96), requests=4)
    return config


def _cells(rates: tuple[float, ...]) -> tuple[dict, ...]:
    systems = (("full", 0), ("balanced", 75))
    return tuple(
        {"system": name, "evicted": evicted, "rate": rate}
        for name, evicted in systems
        for rate in rates
    )
