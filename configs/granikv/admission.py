"""Sections 4.4 and B.10: HOT first, COLD as the fallback, no demotion; and what goes beyond the paper.

    python -m experiments.tables --config=configs/granikv/admission.py
    python -m experiments.tables --config=configs/granikv/admission.py:headline
    python -m experiments.tables --config=configs/granikv/admission.py:smoke

Eight prefixes of 4K tokens share a HOT region that holds them all (`always`), only four of them (`half
fits`: the others go to consecutive pages of COLD, no live prefix leaves HOT), or takes a prefix at its
second or fourth use only, by one copy on the device (`after 2 uses`, `after 4 uses`). `moving boundary`
reserves 60% of the pool for HOT and lends what the prefixes leave; `fixed boundary` is the same pool
without lending, made by taking away the slots that would be lent. Tokens that entered and left HOT,
prefix tokens in COLD, and what it costs in tok/s, TPOT and TTFT. 2 minutes on one H200, 1 for the
headline variant (the first three). The paper gives no numbers for this.
"""

from ml_collections import ConfigDict

from configs.granikv import base


def get_config(variant: str = "full") -> ConfigDict:
    config = base.table(
        "admission", variant, "Admission to HOT: 8 prefixes of 4K, Llama-3.1-8B, B 256"
    )
    config.axes = ("prefix_tokens", "batch")
    config.picture = "pools"
    config.reference = "always"
    config.metrics = (
        "tok_s",
        "speedup",
        "tpot_p50_ms",
        "ttft_p50_s",
        "dense_percent",
        "rows_peak",
        "hot_admitted",
        "hot_released",
        "cold_prefix_peak",
        "lent_peak",
    )
    prefix, pool = 4096, 163_840
    if variant == "smoke":
        base.shrink(config, base.grid("burst", prefix_tokens=64, batch=4, classes=4))
        prefix, pool = 64, 1024
    else:
        config.cells = base.grid("burst", prefix_tokens=prefix, batch=256, classes=8)
        config.engine.max_context = 5120
        config.engine.pool_tokens = pool
    slabs = prefix * config.cells[0]["classes"]
    cold = pool - round(0.6 * pool)
    config.variants = (
        _variant("always", hot_fraction=slabs / pool),
        _variant("half fits", hot_fraction=slabs / 2 / pool),
        _variant("after 2 uses", hot_fraction=slabs / pool, policy="after_hits:2"),
        _variant("after 4 uses", hot_fraction=slabs / pool, policy="after_hits:4"),
        _variant("moving boundary", hot_fraction=0.6),
        _variant("fixed boundary", pool_tokens=slabs + cold, hot_fraction=slabs / (slabs + cold)),
    )
    if variant != "full":
        config.variants = config.variants[:3]
    return config


def _variant(name: str, **fields: float | int | str) -> dict:
    return {"name": name, "system": "kvgrain", **fields}
