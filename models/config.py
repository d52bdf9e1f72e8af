"""Shapes of the decoder: a validated ``ModelConfig`` and the models known by name.

A name enters, a frozen config leaves. Numbers are those of the public model cards
(``config.json`` of Llama-3.1-8B, Qwen2.5-*-Instruct, Qwen3-4B and SmolLM2-135M-Instruct).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvgrain_jax.errors import ConfigError

# Far above any model; a damaged file must not ask for a program that takes hours to compile.
_MAX_LAYERS = 1000
_FREQUENCY_FACTORS = ("low_frequency_factor", "high_frequency_factor")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1's stretching of the low rotary frequencies for contexts longer than it was trained on.

    With ``wavelength = 2 pi / frequency``, a frequency is kept where
    ``wavelength < original_context / high_frequency_factor``, divided by ``factor`` where
    ``wavelength > original_context / low_frequency_factor``, and interpolated between.

    Attributes:
      factor: by how much the lowest frequencies are divided.
      low_frequency_factor: turns over the original context below which a frequency is divided.
      high_frequency_factor: turns over the original context above which a frequency is kept.
      original_context: tokens of the context before stretching.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _check_rope_scaling(vars(self))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of one Llama-family decoder.

    Attributes:
      layers: ``L``.
      d_model: width of the residual stream.
      ffn: width of the feed-forward layer.
      heads: ``H``, query heads.
      kv_heads: ``K``; divides ``heads``.
      head_dim: ``D``; even, and not necessarily ``d_model // heads``.
      vocabulary: rows of the embedding.
      max_context: longest sequence in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama-3.1's stretching, or None.
      eps: added to the mean square in every RMS norm.
      tied_embeddings: the embedding is also the LM head.
      qkv_bias: query, key and value projections have a bias (Qwen2.5).
      qk_norm: queries and keys are RMS-normalised per head before rotation (Qwen3).

    Raises:
      ConfigError: a size is not a positive whole number, or sizes do not fit together.
    """

    layers: int
    d_model: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_context: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    eps: float = 1e-6
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        _check_config(vars(self))

    def to_json(self) -> dict[str, Any]:
        """Returns the config as JSON values, for ``from_json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Builds a config from the values of ``to_json`` or of any file.

        Raises:
          ConfigError: keys are missing or unknown, or a value is not allowed.
        """
        fields = dataclasses.fields(cls)
        values = _complete("model config", fields, values)
        scaling = values["rope_scaling"]
        if isinstance(scaling, dict):
            scaling = _complete("rope scaling", dataclasses.fields(RopeScaling), scaling)
            _check_rope_scaling(scaling)
            scaling = RopeScaling(**_as_floats(scaling, "factor", *_FREQUENCY_FACTORS))
        values = values | {"rope_scaling": scaling}
        _check_config(values)
        return cls(**_as_floats(values, "rope_theta", "eps"))


def named_config(name: str) -> ModelConfig:
    """Returns the config of a model known by name.

    Raises:
      ConfigError: no model of that name; the message lists the names.
    """
    if name not in NAMED_CONFIGS:
        raise ConfigError(f"Unknown model {name!r}. Known models: {', '.join(NAMED_CONFIGS)}.")
    return NAMED_CONFIGS[name]


def _check_config(values: Mapping[str, Any]) -> None:
    what = "model config"
    sizes = ("layers", "d_model", "ffn", "heads", "kv_heads", "head_dim", "vocabulary")
    _counts(what, values, *sizes, "max_context")
    _positive(what, values, "rope_theta", "eps")
    for name in ("tied_embeddings", "qkv_bias", "qk_norm"):
        if not isinstance(values[name], bool):
            raise ConfigError(f"{what}: {name} must be true or false, got {values[name]!r}.")
    if not isinstance(values["rope_scaling"], RopeScaling | None):
        raise ConfigError(
            f"{what}: rope_scaling must be its settings or nothing, got {values['rope_scaling']!r}."
        )
    layers, heads, kv_heads = values["layers"], values["heads"], values["kv_heads"]
    if layers > _MAX_LAYERS:
        raise ConfigError(f"{what}: layers is {layers}, more than the {_MAX_LAYERS} allowed.")
    if heads % kv_heads:
        raise ConfigError(
            f"{what}: {heads} query heads cannot share {kv_heads} KV heads evenly; heads must be a "
            "multiple of kv_heads."
        )
    if values["head_dim"] % 2:
        raise ConfigError(
            f"{what}: head_dim {values['head_dim']} must be even, rotary encoding pairs its halves."
        )


def _check_rope_scaling(values: Mapping[str, Any]) -> None:
    what = "rope scaling"
    low, high = _FREQUENCY_FACTORS
    _positive(what, values, "factor", low, high)
    _counts(what, values, "original_context")
    if values[high] <= values[low]:
        raise ConfigError(f"{what}: {high} {values[high]} must be above {low} {values[low]}.")


def _as_floats(values: dict[str, Any], *names: str) -> dict[str, Any]:
    # JSON has one kind of number.
    return values | {name: float(values[name]) for name in names}


def _complete(
    what: str, fields: tuple[dataclasses.Field, ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Values with the defaults of the fields that are not given."""
    if unknown := sorted(set(values) - {field.name for field in fields}):
        raise ConfigError(f"{what}: unknown keys {', '.join(unknown)}.")
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise ConfigError(f"{what}: keys {', '.join(missing)} are missing.")
    return {field.name: values.get(field.name, field.default) for field in fields}


def _counts(what: str, values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{what}: {name} must be a whole number of at least 1, got {value!r}."
            )


def _positive(what: str, values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        value = values[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{what}: {name} must be a positive number, got {value!r}.")


_QWEN2_5 = {"vocabulary": 152_064, "max_context": 32_768, "rope_theta": 1e6, "qkv_bias": True}

NAMED_CONFIGS: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig(
        layers=32,
        d_model=4096,
        ffn=14_336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=128_256,
        max_context=131_072,
        rope_theta=5e5,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
        eps=1e-5,
    ),
    "qwen2.5-7b": ModelConfig(
        layers=28, d_model=3584, ffn=18_944, heads=28, kv_heads=4, head_dim=128, **_QWEN2_5
    ),
    "qwen2.5-14b": ModelConfig(
        layers=48, d_model=5120, ffn=13_824, heads=40, kv_heads=8, head_dim=128, **_QWEN2_5
    ),
    "qwen2.5-32b": ModelConfig(
        layers=64, d_model=5120, ffn=27_648, heads=40, kv_heads=8, head_dim=128, **_QWEN2_5
    ),
    "qwen3-4b": ModelConfig(
        layers=36,
        d_model=2560,
        ffn=9728,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=151_936,
        max_context=40_960,
        rope_theta=1e6,
        tied_embeddings=True,
        qk_norm=True,
    ),
    "smollm2-135m": ModelConfig(
        layers=30,
        d_model=576,
        ffn=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocabulary=49_152,
        max_context=8192,
        rope_theta=1e5,
        eps=1e-5,
        tied_embeddings=True,
    ),
    # No real model: seconds to compile, for tests and smoke runs.
    "tiny": ModelConfig(
        layers=2,
        d_model=64,
        ffn=128,
        heads=6,
        kv_heads=2,
        head_dim=16,
        vocabulary=512,
        max_context=4096,
        rope_theta=1e4,
        tied_embeddings=True,
    ),
}
