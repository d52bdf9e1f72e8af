"""Replays a recorded trace, scaled down so that a CPU can keep up.

    python -m experiments.serve --config=configs/trace.py --trace=conversation_trace.jsonl

Reads the traces that Mooncake, AzurePublicDataset and kv-cache-tester publish. Prompts are a 32nd
and answers an eighth as long as recorded, time runs twice as fast, silences last a second at most,
and what does not fit the context is cut; the result says how much was.
"""

from ml_collections import ConfigDict

from configs import demo
from experiments.config_fields import workload_fields


def get_config() -> ConfigDict:
    config = demo.get_config()
    config.out = "out/trace"
    # Nothing declares what is shared, and a block of the record is a few tokens long.
    config.update(
        engine={
            "max_context": 2048,
            "pool_tokens": 16384,
            "policy": "after_hits:2",
            "min_hot_tokens": 16,
        }
    )
    config.workload = workload_fields(
        "trace",
        path="",
        requests=32,
        time_compression=2.0,
        max_gap_s=1.0,
        length_scale=1 / 32,
        output_scale=1 / 8,
    )
    return config
