"""Table 23 and Figure 1: the kernels on the device's roofline.

    python -m experiments.tables --config=configs/granikv/roofline.py
    python -m experiments.tables --config=configs/granikv/roofline.py:smoke

Rates of both layouts and of the engine's kernels over their arithmetic intensity, under the matmul rate and
the copy rate that the same run reached. 0.5 minutes on one H200.

Where this differs: bytes are the fewest that must move, not hardware counters, so a rate above the memory
roof means that the cache served reads.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("roofline", variant, "Kernels on the roofline, head shape of Llama-3.1-8B")
    config.paper = ("table23",)
    config.axes = ("storage",)
    config.picture = "roofline"
    config.memory_gib = 16
    config.variants = ({"name": "jax-triton"}, {"name": "mosaic"}, {"name": "triton"})
    config.reference = ""
    config.metrics = ("us", "tflops", "gb_s", "flop_per_byte", "of_roofline_percent")
    config.workload = {"heads": "llama-3.1-8b", "runs": 64, "ceiling": (8192, 1 << 31)}
    both, own = ("jax-triton", "mosaic"), ("mosaic",)
    config.cells = (
        _cell("shared", "shared", both, prefix_tokens=8192),
        _cell("unique", "unique", both, prefix_tokens=8192),
        _cell("prefix, P 2K", "prefix", own, prefix_tokens=2048),
        _cell("prefix, P 16K", "prefix", own, prefix_tokens=16384),
        _cell("cascade prefix, B 8", "prefix", own, batch=8, prefix_tokens=8192),
        _cell("suffix, 256 tokens", "suffix", ("triton",), suffix_tokens=256),
        _cell(
            "16-token pages", "uniform16", ("jax-triton",), prefix_tokens=8192, suffix_tokens=256
        ),
    )
    if variant == "smoke":
        workload = {
            **config.workload,
            "heads": "smollm2-135m",
            "runs": 8,
            "ceiling": (256, 1 << 22),
        }
        small = {"batch": 4, "prefix_tokens": 128}
        cells = [_cell(c, c, ("xla",), **small) for c in ("shared", "unique")]
        cells.append(_cell("suffix", "suffix", ("xla",), batch=4, suffix_tokens=32))
        base.shrink(config, cells)
        config.variants = ({"name": "xla"},)
        config.workload = workload
    return config


def _cell(storage: str, case: str, variants: tuple[str, ...], **fields: int) -> dict:
    return {
        "how": "kernels",
        "storage": storage,
        "case": case,
        "variants": variants,
        "batch": 256,
    } | fields
