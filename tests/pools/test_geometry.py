"""Sizes of the pools."""

import jax.numpy as jnp
import pytest

from kvgrain_jax import ConfigError, PoolGeometry

SHAPE = {"n_layers": 3, "n_kv_heads": 2, "head_dim": 8}


def test_hot_share_is_rounded_to_whole_pages():
    geometry = PoolGeometry.from_tokens(1000, hot_fraction=0.2, page_size=16, **SHAPE)
    assert (geometry.n_slots, geometry.n_hot, geometry.n_pages) == (992, 192, 62)


def test_bytes_become_tokens_of_keys_and_values_of_all_layers():
    per_token = 2 * 3 * 2 * 8 * 2  # keys and values, layers, heads, head dim, bytes of bfloat16
    geometry = PoolGeometry.from_bytes(per_token * 500 + 7, dtype=jnp.bfloat16, **SHAPE)
    assert geometry.n_slots == 500
    assert geometry.bytes_per_token == per_token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 3}, "page_size is 3"),
        ({"hot_fraction": 1.5}, "hot_fraction is 1.5"),
        ({"hot_fraction": float("nan")}, "hot_fraction is nan"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"slab_align": 6, "page_size": 4}, "slab_align 6"),
        ({"tokens": 0}, "holds no page"),
        ({"tokens": -5}, "holds no page"),
        ({"tokens": 2**31}, "slots are int32"),
    ],
)
def test_sizes_that_make_no_sense_are_named(change, message):
    arguments = {"tokens": 1024, **SHAPE, **change}
    with pytest.raises(ConfigError, match=message):
        PoolGeometry.from_tokens(arguments.pop("tokens"), **arguments)
