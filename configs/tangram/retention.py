"""Accuracy of SmolLM2-135M-Instruct from a compressed cache: eight methods at equal bytes.

    python -m experiments.retention --config=configs/tangram/retention.py

Half an hour on two busy CPU cores. Expect static budgets within the interval of dynamic ones at every retention, and both
far above uniform ones from 0.5 down; also with the profile of the other domain. Tests run it
on a tiny model with random weights.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = "smollm2-135m"
    config.dtype = "float32"
    config.domains = ConfigDict({"prose": "prose", "code": "code"})
    config.tasks = (
        "single_needle",
        "multi_needle",
        "key_value",
        "prefix_suffix",
        "variable_tracking",
        "perplexity",
    )
    config.context_tokens = 640
    config.scorer = "kvzip"
    config.sinks = 4
    config.window = 28
    config.seed = 0
    config.profile_samples = 6
    config.samples = 5
    config.methods = (
        "uniform",
        "dynamic",
        "static",
        "static_margin",
        "static_crossed",
        "permuted",
        "protected",
        "random",
    )
    config.retentions = (1.0, 0.75, 0.5, 0.35, 0.25, 0.1)
    # A tenth of 640 tokens is 64: pages of 16 and groups of heads cost accuracy there that they do
    # not in contexts of real length, see retention_coarse.py.
    config.page_size = 4
    config.group_size = 1
    config.out = "out/tangram/retention"
    return config
