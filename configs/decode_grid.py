"""One decode step of Llama-3.1-8B shapes over prefixes and batches, beside vLLM's.

    python -m experiments.decode_grid --config=configs/decode_grid.py
    python -m experiments.decode_grid --config=configs/decode_grid.py:NAME

One H200, bfloat16, random weights. NAME is `headline` (the default), `small`, `end_to_end`,
`regression` (every backend in every cell of a grid), `qwen14b`, `qwen14b_tp2` (two GPUs) or `smoke` (a CPU, seconds). The
peer's figures are vLLM 0.23.0 on the same kind of GPU (FlashAttention 3, CUDA graphs, prefix caching; the
slope between 16 and 144 output tokens), at the same suffix of 128 tokens.
"""

from ml_collections import ConfigDict

LADDER = (0, 128, 512, 1024, 2048, 4096, 8192, 16384)
VLLM_LLAMA = {
    "P 16384, B 256": 90.4,
    "P 8192, B 256": 49.8,
    "P 2048, B 256": 20.4,
    "P 512, B 256": 12.9,
    "P 128, B 256": 11.1,
    "P 16384, B 64": 25.1,
    "P 2048+4096+8192+16384, B 256": 64.8,
    "P 128, B 1": 4.81,
    "P 2048, B 1": 4.85,
    "P 128, B 8": 4.97,
    "P 2048, B 8": 5.26,
    "P 2048, B 32": 6.39,
    "P 8192, B 32": 10.0,
    "P 16384, B 32": 14.8,
    "P 8192, B 128": 26.5,
}
VLLM_QWEN14B = {"P 16384, B 256": 134.5, "P 8192, B 256": 76.8}


def get_config(name: str = "headline") -> ConfigDict:
    config = ConfigDict()
    config.model = "random:llama-3.1-8b"
    config.dtype = "bfloat16"
    config.tp = 1
    config.backends = ("auto",)
    config.suffix_tokens = 128
    config.steps = 64  # two turns: the tokens 16 to 144, as the peer was timed
    config.turns = 2
    config.end_to_end_tokens = 0
    config.profile_steps = 0
    config.engine = ConfigDict(
        {
            "chunk_tokens": 4096,
            "chunk_requests": 32,
            "max_slabs": 16,
            "max_segments": 16,
            "greedy": True,
        }
    )
    config.ceilings = True
    config.peers = ConfigDict(VLLM_LLAMA)
    config.out = f"out/decode_grid/{name}"
    if name == "headline":
        config.cells = (
            ((16384,), 256),
            ((8192,), 256),
            ((2048,), 256),
            ((512,), 256),
            ((128,), 256),
            ((2048, 4096, 8192, 16384), 256),
            ((16384,), 64),
        )
    elif name == "small":
        config.cells = (
            ((128,), 1),
            ((2048,), 8),
            ((2048,), 32),
            ((16384,), 32),
            ((8192,), 128),
        )
    elif name == "end_to_end":
        config.cells = (((16384,), 256),)
        config.engine.backend = "dense"
        config.engine.prefill_decode_steps = 0
        config.backends = ("dense",)
        config.end_to_end_tokens = 144
        config.profile_steps = 32
    elif name == "regression":
        config.cells = tuple(((p,), b) for b in (1, 8, 32, 128, 256, 512) for p in LADDER)
        config.backends = ("auto", "dense", "cascade", "paged")
        config.steps = 16
        config.turns = 4
    elif name in ("qwen14b", "qwen14b_tp2"):
        config.model = "random:qwen2.5-14b"
        config.cells = (((16384,), 256), ((8192,), 256))
        config.peers = ConfigDict(VLLM_QWEN14B)
        config.tp = 2 if name == "qwen14b_tp2" else 1
    elif name == "smoke":
        config.model = "random:tiny"
        config.dtype = "float32"
        config.cells = (((64,), 4), ((32, 48), 4), ((), 2))
        config.backends = ("auto", "dense", "cascade", "paged")
        config.suffix_tokens = 8
        config.steps = 2
        config.turns = 2
        config.end_to_end_tokens = 4
        config.profile_steps = 2
        config.ceilings = False
        config.engine = ConfigDict(
            {
                "chunk_tokens": 64,
                "chunk_requests": 4,
                "max_slabs": 8,
                "max_segments": 8,
                "min_hot_tokens": 8,
            }
        )
    else:
        raise ValueError(f"There is no variant {name!r} of this config.")
    return config
