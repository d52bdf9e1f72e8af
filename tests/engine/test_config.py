"""Configuration: what does not exist or does not fit is refused by name before anything is built."""

import math

import jax.numpy as jnp
import pytest

from kvgrain_jax import ConfigError, EngineConfig, Model, system_config
from kvgrain_jax.engine import SYSTEMS

MODEL = Model(
    step=lambda *_: None,
    params=None,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=16,
    vocabulary=10,
    max_context=64,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "flash"}, "no backend 'flash'; choose auto or one of dense"),
        ({"m_sat": 0}, "m_sat is 0"),
        ({"policy": "sometimes"}, "no admission policy 'sometimes'"),
        ({"policy": "after_hits:0"}, "at least 1, not 0"),
        ({"min_hot_tokens": -1}, "min_tokens is -1"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"chunk_tokens": -1}, "chunk_tokens is -1"),
        ({"chunk_requests": 0}, "chunk_requests is 0"),
        ({"decode_steps": 0}, "decode_steps is 0"),
        ({"max_staged": -1}, "max_staged is -1"),
        ({"patience": -1}, "patience is -1"),
        ({"max_slabs": 0}, "max_slabs is 0"),
        ({"max_segments": 0}, "max_segments is 0"),
        ({"max_pieces": 0}, "max_pieces is 0"),
        ({"max_context": 0}, "max_context is 0"),
        ({"max_context": -8}, "max_context is -8"),
        ({"pool_tokens": None}, "either pool_tokens or pool_bytes"),
        ({"pool_bytes": 10**6}, "either pool_tokens or pool_bytes"),
        ({"batch_buckets": (4, 2, 8)}, r"batch_buckets is \(4, 2, 8\).* end with 8"),
        ({"batch_buckets": (2, 4)}, "end with 8"),
        ({"batch_buckets": (0, 8)}, "batch_buckets"),
        ({"chunk_buckets": (16, 512)}, "chunk_buckets .* end with 256"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"pool_tokens": 1024} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 8}, "page_size is 8; choose one of"),
        ({"hot_fraction": 1.5}, "hot_fraction is 1.5"),
        ({"hot_fraction": math.nan}, "hot_fraction is nan"),
        ({"pool_tokens": 0}, "0 tokens holds no page"),
        ({"pool_tokens": 12, "page_size": 16}, "12 tokens holds no page of 16"),
        ({"slab_align": 0}, "slab_align is 0"),
        ({"slab_align": 24, "page_size": 16}, "slab_align 24 must be a multiple"),
    ],
)
def test_sizes_of_pools_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"pool_tokens": 1024} | fields).geometry(MODEL)


def test_buckets_default_to_the_largest_size():
    config = EngineConfig(pool_tokens=1024, max_batch=6, chunk_tokens=100)
    assert (config.batch_buckets, config.chunk_buckets) == ((6,), (100,))


def test_pool_bytes_count_keys_and_values_of_all_layers():
    # 2 layers of 2 KV heads of 16 numbers, keys and values, 2 bytes each: 256 bytes a token.
    config = EngineConfig(pool_bytes=256 * 100 + 255, hot_fraction=0.25, kv_dtype=jnp.bfloat16)
    geometry = config.geometry(MODEL)
    assert (geometry.n_slots, geometry.n_hot, geometry.bytes_per_token) == (100, 25, 256)


def test_an_unknown_system_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="no system 'vllm'; choose one of uniform16, cascade16"):
        system_config("vllm", pool_tokens=64)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="no option batch_size, colour"):
        system_config("kvgrain", pool_tokens=64, colour=1, batch_size=2)


@pytest.mark.parametrize("name", ["uniform16", "cascade16"])
def test_options_do_not_change_what_makes_a_baseline(name):
    config = system_config(
        name, pool_tokens=64, page_size=1, hot_fraction=0.5, backend="dense", max_batch=3
    )
    assert (config.page_size, config.hot_fraction, config.max_batch) == (16, 0.0, 3)
    assert config.backend == SYSTEMS[name]["backend"] != "dense"


def test_options_shape_kvgrain():
    config = system_config("kvgrain", pool_tokens=64, page_size=4, backend="dense")
    assert (config.page_size, config.backend, config.hot_fraction) == (4, "dense", 0.2)
