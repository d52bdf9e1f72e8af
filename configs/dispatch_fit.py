"""Times that the dispatch decides by: dense, cascade and paged attention of one layer.

python -m experiments.dispatch_fit --config=configs/dispatch_fit.py            # one GPU, about a minute
python -m experiments.dispatch_fit --config=configs/dispatch_fit.py --write    # and into the library
python -m experiments.dispatch_fit --config=configs/dispatch_fit.py:smoke      # a CPU, seconds
"""

from ml_collections import ConfigDict


def get_config(name: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.shapes = ("llama-3.1-8b", "qwen2.5-14b")
    config.dtype = "bfloat16"
    config.rows = (1, 8, 32, 128, 256, 512)
    config.prefix_tokens = (128, 512, 2048, 8192, 16384)
    config.own_tokens = (16, 128, 512, 2048, 8192, 16384)
    config.pool_tokens = 262144
    config.out = f"out/dispatch_fit/{name}"
    if name == "smoke":
        config.shapes = ((2, 3, 16),)
        config.dtype = "float32"
        config.rows = (1, 4)
        config.prefix_tokens = (16, 64)
        config.own_tokens = (4, 16)
        config.pool_tokens = 256
    elif name != "default":
        raise ValueError(f"There is no variant {name!r} of this config.")
    return config
