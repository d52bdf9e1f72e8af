"""Four agents with long system prompts, 32 questions, three systems, on SmolLM2-135M-Instruct.

    python -m experiments.serve --config=configs/demo.py        (or: make demo)

Prints an answer of each agent and the table of the three systems, and says whether they generated
the same tokens: they must, in float32. Three and a half minutes on two CPU cores. Expect identical
tokens, and `kvgrain` to read some 70 MiB of prefix KV a step where the others read 197.
"""

from ml_collections import ConfigDict

from experiments.config_fields import engine_fields, workload_fields


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = "smollm2-135m"
    config.dtype = "float32"
    config.systems = ("uniform16", "cascade16", "kvgrain")
    config.must_agree = True
    config.out = "out/demo"
    config.engine = engine_fields(
        max_batch=16,
        max_context=1536,
        # Small, for a laptop: HOT just holds the four system prompts, some 3,100 tokens.
        pool_tokens=8192,
        hot_fraction=0.4,
        chunk_tokens=128,
        decode_steps=8,
        # On a CPU dense wins always (m_sat 1); a threshold of 8 rows lets both backends be seen.
        m_sat=24,
    )
    config.workload = workload_fields(
        "agents",
        folder="configs/agents",
        agents=("cook", "tutor", "support", "analyst"),
        output_tokens=32,
        arrivals="poisson",
        rate=4.0,
    )
    return config
