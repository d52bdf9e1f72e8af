"""Head profiles of SmolLM2-135M-Instruct on two domains, with KVzip scores.

    python -m experiments.head_profile --config=configs/tangram/head_profile.py

Seven minutes on two busy CPU cores. Expect heads that differ much more from each other than one head does from context to
context, and the same ranking of the heads in both domains.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = "smollm2-135m"
    config.dtype = "float32"
    config.domains = ConfigDict({"prose": "prose", "code": "code"})
    config.tasks = ("multi_needle", "key_value", "prefix_suffix", "variable_tracking", "perplexity")
    config.context_tokens = 640
    config.samples = 10
    config.scorer = "kvzip"
    config.targets = (0.25, 0.5)
    config.sinks = 4
    config.window = 28
    config.alpha = 2.0
    config.seed = 0
    config.published = ConfigDict()
    config.out = "out/tangram/head_profile"
    return config
