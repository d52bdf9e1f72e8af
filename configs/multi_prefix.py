"""Four prefixes of different lengths, interleaved: several classes share one batch.

    python -m experiments.serve --config=configs/multi_prefix.py
    python -m experiments.serve --config=configs/multi_prefix.py \
        --config.workload.prefix_tokens="(512, 512, 512, 512)"
"""

from ml_collections import ConfigDict

from configs import burst


def get_config() -> ConfigDict:
    config = burst.get_config()
    config.out = "out/multi_prefix"
    config.update(workload={"prefix_tokens": (256, 512, 768, 1024)})
    return config
