"""Shares of attention, matmuls, other kernels and idle time in the decode loop.

python -m experiments.profile --config=configs/profile.py          # one H200, about a minute
python -m experiments.profile --config=configs/profile.py:smoke    # a CPU, seconds
"""

from ml_collections import ConfigDict


def get_config(name: str = "llama8b") -> ConfigDict:
    config = ConfigDict()
    config.model = "random:llama-3.1-8b"
    config.dtype = "bfloat16"
    config.tp = 1
    config.cells = (((16384,), 256), ((2048,), 256))
    config.backends = ("auto",)
    config.suffix_tokens = 128
    config.steps = 8
    config.engine = ConfigDict(
        {
            "chunk_tokens": 4096,
            "chunk_requests": 32,
            "max_slabs": 16,
            "max_segments": 16,
            "greedy": True,
        }
    )
    config.out = f"out/profile/{name}"
    if name == "smoke":
        config.model, config.dtype = "random:tiny", "float32"
        config.cells = (((64,), 4),)
        config.suffix_tokens, config.steps = 8, 2
        config.engine = ConfigDict({"chunk_tokens": 64, "chunk_requests": 4})
    elif name != "llama8b":
        raise ValueError(f"There is no variant {name!r} of this config.")
    return config
