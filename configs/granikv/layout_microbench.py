"""Table 5: one prefix kernel over two layouts, B 256, P 8K, head shape of Llama-3.1-8B.

    python -m experiments.tables --config=configs/granikv/layout_microbench.py
    python -m experiments.tables --config=configs/granikv/layout_microbench.py:smoke

`shared`: all rows read one contiguous prefix. `unique`: each row reads a copy of its own, as rows that
read the same prefix through pages do. The same kernel and the same work; what differs is how often a byte
is read. `jax-triton` is the baseline kernel with the same tile for both; `mosaic` is our own. 0.5 minutes on one H200.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("layout_microbench", variant, "One kernel, two layouts: B 256, P 8K")
    config.paper = ("table05",)
    config.axes = ("storage",)
    config.picture = "kernels"
    config.memory_gib = 16
    config.variants = ({"name": "jax-triton"}, {"name": "mosaic"})
    config.reference = ""
    config.derive = ("layouts",)
    config.metrics = ("us", "device_us", "slowdown", "gb_s", "tflops", "flop_per_byte")
    config.workload = {"heads": "llama-3.1-8b", "runs": 64, "ceiling": (8192, 1 << 31)}
    config.cells = tuple(
        {"how": "kernels", "storage": s, "case": s, "batch": 256, "prefix_tokens": 8192}
        for s in ("shared", "unique")
    )
    if variant == "smoke":
        smoke = config.copy_and_resolve_references()
        cells = [{**cell, "batch": 4, "prefix_tokens": 128} for cell in config.cells]
        base.shrink(config, cells)
        config.variants = ({"name": "xla"},)
        config.workload = {
            **smoke.workload,
            "heads": "smollm2-135m",
            "runs": 8,
            "ceiling": (256, 1 << 22),
        }
    return config
