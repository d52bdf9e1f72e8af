"""Sixteen requests at once, all over one prefix of 1,024 tokens: the case the papers measure.

    python -m experiments.serve --config=configs/burst.py
    python -m experiments.serve --config=configs/burst.py \
        --config.workload.requests=8 --config.workload.prefix_tokens=2048
"""

from ml_collections import ConfigDict

from experiments.config_fields import engine_fields, workload_fields


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = "smollm2-135m"
    config.dtype = "float32"
    config.systems = ("uniform16", "cascade16", "kvgrain")
    config.must_agree = True
    config.out = "out/burst"
    config.engine = engine_fields(
        max_batch=16,
        max_context=2560,
        # HOT holds 3,276 tokens.
        pool_tokens=8192,
        hot_fraction=0.4,
        chunk_tokens=256,
        chunk_buckets=(64, 256),
        decode_steps=8,
    )
    config.workload = workload_fields(
        "synthetic",
        requests=16,
        prefix_tokens=(1024,),
        suffix_tokens=32,
        output_tokens=48,
    )
    return config
