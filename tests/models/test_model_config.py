"""Configs: the named models have the published sizes, and what does not fit together is refused."""

import dataclasses
import math

import pytest

from kvgrain_jax.errors import ConfigError
from models import NAMED_CONFIGS, ModelConfig, RopeScaling, named_config
from models.weights import expected_tensors

TINY = NAMED_CONFIGS["tiny"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-4b", 4_022_468_096),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_named_model_has_the_published_number_of_parameters(name, parameters):
    shapes = expected_tensors(named_config(name)).values()
    assert sum(math.prod(shape) for shape in shapes) == parameters


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'gpt-5'.*llama-3\.1-8b.*smollm2-135m"):
        named_config("gpt-5")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", 10**9),
        ("d_model", -1),
        ("ffn", 1.5),
        ("heads", 7),
        ("kv_heads", 0),
        ("head_dim", 15),
        ("vocabulary", True),
        ("max_context", "long"),
        ("rope_theta", math.nan),
        ("rope_theta", 0.0),
        ("eps", math.inf),
        ("eps", -1e-6),
        ("qk_norm", 1),
        ("rope_scaling", 8.0),
    ],
)
def test_senseless_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_json(TINY.to_json() | {field: value})


def test_sizes_that_do_not_fit_are_refused_in_code_too():
    with pytest.raises(ConfigError, match="7 query heads cannot share 2 KV heads"):
        dataclasses.replace(TINY, heads=7)


def test_whole_numbers_of_a_file_may_stand_for_real_ones():
    config = ModelConfig.from_json(TINY.to_json() | {"rope_theta": 1_000_000})
    assert config == dataclasses.replace(TINY, rope_theta=1e6)


def test_rope_scaling_needs_its_factors_in_order():
    with pytest.raises(ConfigError, match="high_frequency_factor"):
        RopeScaling(8.0, 4.0, 1.0, 8192)


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_config_survives_json(name):
    config = NAMED_CONFIGS[name]
    assert ModelConfig.from_json(config.to_json()) == config


def test_json_with_a_missing_or_unknown_key_is_refused():
    values = TINY.to_json()
    with pytest.raises(ConfigError, match="unknown keys colour"):
        ModelConfig.from_json(values | {"colour": 1})
    del values["ffn"]
    with pytest.raises(ConfigError, match="keys ffn are missing"):
        ModelConfig.from_json(values)
