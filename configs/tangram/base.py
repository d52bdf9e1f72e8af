"""What the serving experiments have in common: models, engine sizes for one H200, the smoke variant.

``serving(...)`` starts a config for one of ``MODELS``; ``shrink(config)`` turns it into its smoke variant. All
experiments of a model have one pool and one longest context, so that they share compiled programs.
"""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from kvgrain_jax.errors import ConfigError

MODELS = ("qwen3-4b", "qwen2.5-7b")
CONTEXT = 16_384
# The context, and room for questions and answers.
MAX_CONTEXT = 17_408
SMOLLM2_PROFILE = "results/cpu/tangram/head_profile/profile_0.25.npz"

type Config = Any  # a ConfigDict, whose fields have no static types


def serving(name: str, variant: str, title: str, *variants: str) -> Config:
    """A config with every field set; a file then says what its experiment is about.

    Args:
      name: of the config file.
      variant: one of ``MODELS``, perhaps with ``-`` and one of ``variants`` behind it, or ``smoke``.
      title: of the experiment.
      *variants: further ones that the file has.

    Raises:
      ConfigError: there is no such variant.
    """
    every = ["smoke", *MODELS, *(f"{model}-{v}" for model in MODELS for v in variants)]
    if variant not in every:
        raise ConfigError(
            f"{name} has no variant {variant!r}; choose one of {', '.join(every)} "
            f"(--config=configs/tangram/{name}.py:smoke)."
        )
    model = next((model for model in MODELS if variant.startswith(model)), MODELS[0])
    config = ConfigDict()
    config.name = name
    config.title = f"{title}, {model}"
    config.notes = (
        "random weights in the model's shape: speeds do not depend on their values",
        "JAX on one NVIDIA H200; the paper's engine is vLLM on A100-80GB, so only ratios can be "
        "compared",
        f"{MAX_CONTEXT:,} tokens at most, a sixth of the paper's long contexts, so that a cell takes "
        "seconds; the pool is smaller in proportion",
    )
    config.measure = ""
    config.platform = "gpu"
    config.memory_gib = 48
    config.model = f"random:{model}"
    config.dtype = "bfloat16"
    config.max_context = MAX_CONTEXT
    config.profile = ConfigDict({"path": "", "sinks": 32, "window": 1024})
    config.engine = ConfigDict(
        {
            "page_size": 16,
            "scorer": "snapkv",
            "gates": "",
            "max_context": MAX_CONTEXT,
            "max_batch": 16,
            "batch_buckets": (16,),
            "chunk_tokens": 4096,
            "chunk_buckets": (128, 4096),
            "decode_steps": 32,
            "slab_align": 64,
            "greedy": True,
            "kv_dtype": "bfloat16",
        }
    )
    config.workload = {
        "group_size": 4,
        "full_rows": 4,
        "context_tokens": CONTEXT,
        "output_tokens": 128,
        "patience": 64,
        "seed": 0,
    }
    config.axes = ("system", "evicted")
    config.cells = ()
    config.picture = ConfigDict({"x": "evicted", "series": "system", "y": (), "stack": ()})
    config.out = f"out/tangram/{name}_{variant}"
    return config


def shrink(config: Config, cells: tuple[dict[str, Any], ...], **workload: Any) -> None:
    """The smoke variant: a tiny random model in float32, seconds on a CPU.

    The committed profile of SmolLM2 is resampled to its heads.

    Args:
      config: the full config.
      cells: its cells.
      **workload: fields in which its workload differs.
    """
    config.title += " (smoke: a tiny model)"
    config.notes = ("smoke variant: checks that all parts work, measures no speed",)
    config.platform = "any"
    config.model = "random:tiny"
    config.dtype = "float32"
    config.max_context = 0
    path = pathlib.Path(__file__).parents[2] / SMOLLM2_PROFILE
    config.profile = ConfigDict({"path": str(path), "sinks": 2, "window": 6})
    config.engine.update(
        page_size=4,
        scorer="key_norm",
        max_context=128,
        max_batch=8,
        batch_buckets=(8,),
        chunk_tokens=32,
        chunk_buckets=(32,),
        decode_steps=4,
        slab_align=8,
        kv_dtype="float32",
    )
    config.workload = {
        **config.workload,
        "group_size": 2,
        "full_rows": 2,
        "context_tokens": 96,
        "output_tokens": 4,
        **workload,
    }
    config.cells = cells
