"""As ``retention.py``, with pages of 16 tokens and groups of three heads: what granularity costs.

    python -m experiments.retention --config=configs/tangram/retention_coarse.py

Twenty minutes on two busy CPU cores. Expect the figures of ``retention.py`` at a retention of 0.25. At
0.1 a head keeps four pages on average and two of them are protected, and few of the model's 90 heads
need much, so three that share a length fit them badly: static budgets fall behind dynamic ones, which
are not grouped.
"""

from ml_collections import ConfigDict

from configs.tangram import retention


def get_config() -> ConfigDict:
    config = retention.get_config()
    config.page_size = 16
    # Divides the 90 heads of the model; 4 does not.
    config.group_size = 3
    config.methods = ("uniform", "dynamic", "static")
    config.retentions = (0.25, 0.1)
    config.out = "out/tangram/retention_coarse"
    return config
