"""Beyond the paper: recorded traces on the three systems, Llama-3.1-8B.

    python -m experiments.tables --config=configs/granikv/trace_replay.py \
        --config.workload.traces.mooncake.path=conversation_trace.jsonl \
        --config.workload.traces.agents.path=kvct_compact.jsonl.gz \
        --config.workload.traces.dialogues.path=gpt-4o-airline.json
    python -m experiments.tables --config=configs/granikv/trace_replay.py:headline …
    python -m experiments.tables --config=configs/granikv/trace_replay.py:smoke

Hit rate, tokens that were not computed again, tok/s and TTFT for
  mooncake   the conversation trace of kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0);
  agents     sessions of coding agents of callanjfox/kv-cache-tester (traces, Apache-2.0);
  dialogues  tool-using dialogues of sierra-research/tau-bench (historical_trajectories, MIT).
No trace is part of the repository; one without a file is listed as not run. Time is compressed (a field
of each trace), prompts longer than the context are cut, and `result.json` says how many. Prefixes are not
declared: the index finds them, and one goes to HOT at its second use. About 45 minutes on one H200 (estimated,
not measured), 5 for the headline variant (40, 80 and 100 requests), 1.4 of them
compilation. Arrival times of the dialogues are made up: one starts every 2 s, its requests follow each other
every 5 s.
"""

import pathlib

from ml_collections import ConfigDict

from configs.granikv import base
from experiments.config_fields import workload_fields

# Made up; in the form of the Mooncake trace.
SAMPLE = pathlib.Path(__file__).with_name("sample_trace.jsonl")


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table("trace_replay", variant, "Recorded traces, Llama-3.1-8B")
    config.axes = ("trace",)
    config.picture = "replay"
    config.metrics = (
        "hit_percent",
        "tokens_saved",
        "tok_s",
        "speedup",
        "tpot_p50_ms",
        "ttft_p50_s",
        "ttft_p99_s",
        "hot_peak",
        "prefix_mib_step",
        "dense_percent",
    )
    config.memory_gib = 104
    config.engine.pool_tokens = 600_064
    config.engine.max_context = 32_768
    config.engine.max_batch = 64
    config.engine.chunk_buckets = (512, 2048, 4096)
    config.engine.hot_fraction = 0.5
    config.engine.policy = "after_hits:2"
    config.engine.min_hot_tokens = 512
    traces = {
        "mooncake": workload_fields("trace", path="", requests=400, time_compression=4.0),
        "agents": workload_fields(
            "trace",
            path="",
            requests=300,
            max_sessions=16,
            session_gap_s=10.0,
            time_compression=8.0,
            api_time_scale=0.1,
            max_gap_s=2.0,
            length_scale=0.25,
            output_scale=0.5,
        ),
        "dialogues": workload_fields("trace", path="", requests=600, session_gap_s=2.0),
    }
    config.workload.traces = traces
    config.cells = base.grid("replay", trace=("mooncake", "agents", "dialogues"))
    if variant == "headline":
        traces["mooncake"].requests = 40
        traces["agents"].requests = 80
        traces["dialogues"].update(requests=100, time_compression=4.0)
        config.workload.traces = traces
    if variant == "smoke":
        cells = base.grid("replay", trace="mooncake")
        base.shrink(config, cells, policy="after_hits:2", min_hot_tokens=16)
        config.workload.traces["mooncake"].update(
            path=str(SAMPLE), requests=8, length_scale=1 / 32, output_scale=1 / 32, max_gap_s=0.1
        )
    return config
