"""What the tables have in common: systems, engine sizes for one H200, and the smoke variant.

``table(...)`` starts a config, ``shrink(config)`` turns it into its smoke variant, ``grid(...)`` lists
cells. One engine shape serves all cells of a table, so that each program is compiled once.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from experiments.config_fields import engine_fields
from experiments.table_turns import FITTED
from kvgrain_jax.errors import ConfigError

SYSTEMS = tuple({"name": n, "system": n} for n in ("uniform16", "cascade16", "kvgrain"))
KVGRAIN = SYSTEMS[-1:]
SPEEDS = ("tok_s", "speedup", "tpot_p50_ms", "ttft_p50_s")
VARIANTS = ("full", "headline", "smoke")

P_LADDER = (512, 1024, 2048, 4096, 8192, 16384)
B_LADDER = (8, 32, 128, 256)

# The KV budget of the paper's A100-40GB beside Llama-3.1-8B: 7,420 HOT slots at f_p 0.05 (Table 24).
PAPER_POOL_TOKENS = 148_480

# Device memory, GiB: weights in bfloat16, the pool, and 12 GiB for activations and programs.
MEMORY = {"llama-3.1-8b": 60, "qwen2.5-14b": 90, "qwen2.5-32b": 116}
POOLS = {"llama-3.1-8b": 262_144, "qwen2.5-14b": 262_144, "qwen2.5-32b": 172_032}


type Config = Any  # a ConfigDict, whose fields have no static types


def table(name: str, variant: str, title: str, model: str = "llama-3.1-8b") -> Config:
    """A config with every field set; a file then says what its table is about.

    Args:
      name: of the config file.
      variant: one of ``VARIANTS``.
      title: of the table.
      model: name of a model's shape; its weights are random.

    Raises:
      ConfigError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ConfigError(
            f"{name} has no variant {variant!r}; choose one of {', '.join(VARIANTS)} "
            f"(--config=configs/granikv/{name}.py:smoke)."
        )
    config = ConfigDict()
    config.name = name
    config.title = title
    config.size = variant
    config.notes = (
        "random weights in the model's shape: speeds do not depend on their values",
        "JAX on NVIDIA H200 at full size; the paper's engine is SGLang on A100-SXM4-40GB, so only "
        "ratios can be compared",
    )
    config.paper = ()
    config.platform = "gpu"
    config.memory_gib = MEMORY[model]
    config.model = f"random:{model}"
    config.dtype = "bfloat16"
    config.engine = engine_fields(
        max_batch=256,
        # 16K of prefix, and what a row may add to it.
        max_context=17_408,
        pool_tokens=POOLS[model],
        hot_fraction=0.2,
        chunk_tokens=4096,
        # Some 32 short turns fill the smaller one.
        chunk_buckets=(2048, 4096),
        chunk_requests=32,
        decode_steps=8,
        max_slabs=256,
        kv_dtype="bfloat16",
    )
    config.variants = SYSTEMS
    config.reference = "uniform16"
    config.workload = {
        "turns": FITTED,
        "output_tokens": 256,
        "requests": 500,
        "rate": 200.0,
        "seed": 42,
        "suffix_tokens": 256,
        "repeats": 10,
    }
    config.axes = ("prefix_tokens", "batch")
    config.metrics = SPEEDS
    config.derive = ()
    config.picture = "ladder"
    config.must_agree = False
    config.cells = ()
    config.out = f"out/granikv/{name}"
    return config


def grid(how: str, **axes: Any) -> tuple[dict[str, Any], ...]:
    """Cells over all combinations of the axes; an axis that is no tuple is the same in all."""
    several = {k: v if isinstance(v, tuple) else (v,) for k, v in axes.items()}
    return tuple(
        {"how": how, **dict(zip(several, values, strict=True))}
        for values in itertools.product(*several.values())
    )


def shrink(config: Config, cells: Sequence[dict[str, Any]], **engine: Any) -> None:
    """The smoke variant: a tiny random model in float32, seconds on a CPU, tokens compared exactly.

    Args:
      config: the full config.
      cells: its cells.
      **engine: fields of ``EngineConfig`` in which it differs from other smoke variants; those share
        their compiled programs.
    """
    config.title += " (smoke: a tiny model)"
    config.notes = ("smoke variant: checks that all parts work, measures no speed",)
    config.platform = "any"
    config.memory_gib = 1
    config.model = "random:tiny"
    config.dtype = "float32"
    config.must_agree = True
    config.engine = engine_fields(
        **{
            "max_batch": 4,
            "max_context": 256,
            "pool_tokens": 1024,
            "hot_fraction": 0.25,
            "chunk_tokens": 64,
            "chunk_buckets": (),
            "chunk_requests": 4,
            "decode_steps": 4,
            "max_slabs": 16,
            "max_segments": 16,
            # Three query heads a KV head: four rows are dense, fewer take the cascade.
            "m_sat": 12,
            **engine,
        }
    )
    config.update(
        workload={
            "turns": {"least": 4, "most": 12},
            "output_tokens": 6,
            "requests": 6,
            "suffix_tokens": 8,
            "repeats": 2,
        }
    )
    config.cells = tuple(cells)
    config.out += "_smoke"
