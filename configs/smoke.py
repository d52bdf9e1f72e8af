"""A tiny model with random weights: every part of ``serve`` in seconds.

python -m experiments.serve --config=configs/smoke.py
"""

from ml_collections import ConfigDict

from experiments.config_fields import engine_fields, workload_fields


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = "random:tiny"
    config.dtype = "float32"
    config.systems = ("uniform16", "cascade16", "kvgrain")
    config.must_agree = True
    config.out = "out/smoke"
    config.engine = engine_fields(
        max_batch=4, max_context=256, pool_tokens=1024, chunk_tokens=64, decode_steps=4
    )
    config.workload = workload_fields(
        "synthetic", requests=6, prefix_tokens=(96, 64), suffix_tokens=8, output_tokens=8
    )
    return config
