"""Requests over one prefix of 1,024 tokens that arrive as a Poisson process.

python -m experiments.serve --config=configs/poisson.py
python -m experiments.serve --config=configs/poisson.py --config.workload.rate=4.0
"""

from ml_collections import ConfigDict

from configs import burst


def get_config() -> ConfigDict:
    config = burst.get_config()
    config.out = "out/poisson"
    config.update(workload={"requests": 24, "arrivals": "poisson", "rate": 1.0})
    return config
