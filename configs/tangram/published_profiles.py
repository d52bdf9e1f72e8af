"""Stability of head profiles that others measured: which budget rule should be the default?

    python -m experiments.head_profile --config=configs/tangram/published_profiles.py \\
        --config.published.fastkvzip=FILE.npz --config.published.snapkv=FILE.npz

The files are ``profile.npz`` of ``tools/head_group_clustering/cluster_maps/{fastkvzip,snapkv}/
qwen3-4b-instruct-2507`` in github.com/aiha-lab/TANGRAM (Apache-2.0), 28 contexts of SCBench each. A
few seconds, no model. Expect a rank correlation of the heads between sample halves above 0.98, and
the picture of the paper's Figures 2(a) and 6.
"""

from ml_collections import ConfigDict

from configs.tangram import head_profile


def get_config() -> ConfigDict:
    config = head_profile.get_config()
    config.published = ConfigDict({"fastkvzip": "", "snapkv": ""})
    config.out = "out/tangram/published_profiles"
    return config
