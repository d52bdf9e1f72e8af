"""One decode step of the three systems with 16 rows over a prefix of 1,024 tokens.

python -m experiments.decode_step --config=configs/decode_step.py
"""

from ml_collections import ConfigDict

from experiments.config_fields import engine_fields


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = "smollm2-135m"
    config.dtype = "float32"
    config.systems = ("uniform16", "cascade16", "kvgrain")
    config.out = "out/decode_step"
    config.engine = engine_fields(chunk_tokens=256)
    config.prefix_tokens = 1024
    config.batch = 16
    config.suffix_tokens = 32
    config.steps = 4
    config.repeats = 15
    return config
