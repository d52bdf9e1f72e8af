"""Gates that score tokens of SmolLM2-135M-Instruct from hidden states, trained on KVzip scores.

    python -m experiments.train_gate --config=configs/tangram/train_gate.py

Some ten minutes on two busy CPU cores. Expect the gates to keep three quarters of what KVzip keeps of
texts they have not seen, where SnapKV's scores keep less than half.
"""

from ml_collections import ConfigDict

from configs.tangram import head_profile


def get_config() -> ConfigDict:
    contexts = head_profile.get_config()
    config = ConfigDict()
    for name in ("model", "dtype", "domains", "tasks", "context_tokens", "sinks", "window", "seed"):
        config[name] = contexts[name]
    config.samples = 3
    config.test_samples = 2
    config.epochs = 20
    config.rate = 2.0
    config.rank = 16
    config.gate_sinks = 8
    config.retention = 0.25
    config.out = "out/tangram/train_gate"
    return config
