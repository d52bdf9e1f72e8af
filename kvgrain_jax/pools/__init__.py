"""Functional pool states: HOT slabs, COLD pages, lending between them, and the KV buffers."""

from kvgrain_jax.pools import buffers as buffers
from kvgrain_jax.pools import cold as cold
from kvgrain_jax.pools import hot as hot
from kvgrain_jax.pools import lending as lending
from kvgrain_jax.pools.buffers import KVCache as KVCache
from kvgrain_jax.pools.geometry import PoolGeometry as PoolGeometry
from kvgrain_jax.pools.lending import PoolState as PoolState
