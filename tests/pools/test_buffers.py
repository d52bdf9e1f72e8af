"""KV buffers: writing and copying tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax import PoolGeometry
from kvgrain_jax.pools import buffers


@pytest.fixture
def geometry():
    return PoolGeometry(n_layers=2, n_kv_heads=2, head_dim=3, n_slots=8, n_hot=4, slab_align=4)


def tokens(*values):
    return jnp.stack([jnp.full((2, 3), value, jnp.float32) for value in values])


def test_pools_start_at_zero(geometry):
    cache = buffers.init(geometry)
    assert all(not np.any(x) for x in (*cache.k, *cache.v))


def test_write_reaches_its_slots_and_layer_alone(geometry):
    cache = buffers.write(
        buffers.init(geometry), 1, jnp.asarray([5, 2], jnp.int32), tokens(1, 2), tokens(3, 4)
    )
    assert cache.k[1][:, 0, 0].tolist() == [0, 0, 2, 0, 0, 1, 0, 0]
    assert cache.v[1][:, 1, 2].tolist() == [0, 0, 4, 0, 0, 3, 0, 0]
    assert not np.any(cache.k[0])


def test_slot_behind_the_pool_drops_the_row(geometry):
    cache = buffers.write(
        buffers.init(geometry), 0, jnp.asarray([8, 100], jnp.int32), tokens(1, 2), tokens(3, 4)
    )
    assert not np.any(cache.k[0])
    assert not np.any(cache.v[0])


def test_copy_moves_all_layers_and_drops_padding(geometry):
    cache = buffers.init(geometry)
    for layer in range(2):
        cache = buffers.write(
            cache, layer, jnp.asarray([6, 7], jnp.int32), tokens(layer + 1, 9), tokens(5, 9)
        )
    cache = buffers.copy_slots(
        cache, jnp.asarray([6, 7, 0], jnp.int32), jnp.asarray([0, 1, 8], jnp.int32)
    )
    assert [cache.k[layer][:2, 0, 0].tolist() for layer in range(2)] == [[1, 9], [2, 9]]
    assert cache.v[0][:2, 0, 0].tolist() == [5, 9]
