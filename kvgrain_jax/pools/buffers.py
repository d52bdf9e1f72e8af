"""KV buffers: one pair of arrays per layer over the one index space of slots."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvgrain_jax.pools.geometry import PoolGeometry
from pallas_kernels import append_kv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every slot.

    One array per layer, not one stacked array: carried through ``lax.while_loop`` they compile to
    no copy of a pool-sized array.

    Attributes:
      k: ``L`` arrays ``[N, K, D]``.
      v: ``L`` arrays ``[N, K, D]``.
    """

    k: tuple[Float[Array, "N K D"], ...]
    v: tuple[Float[Array, "N K D"], ...]


def init(geometry: PoolGeometry) -> KVCache:
    """Zero keys and values: a stale NaN times a probability of zero would be NaN."""
    shape = (geometry.n_slots, geometry.n_kv_heads, geometry.head_dim)

    def zeros():
        return tuple(jnp.zeros(shape, geometry.dtype) for _ in range(geometry.n_layers))

    return KVCache(k=zeros(), v=zeros())


def write(
    cache: KVCache,
    layer: int,
    slots: Int[Array, "T"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
) -> KVCache:
    """Write keys and values of ``T`` tokens of one layer to their slots (``N`` or more drops one).

    In place when the cache is donated. See ``pallas_kernels.append_kv``.
    """
    new_k, new_v = append_kv(cache.k[layer], cache.v[layer], k, v, slots)
    return KVCache(
        k=(*cache.k[:layer], new_k, *cache.k[layer + 1 :]),
        v=(*cache.v[:layer], new_v, *cache.v[layer + 1 :]),
    )


def copy_slots(cache: KVCache, source: Int[Array, "T"], target: Int[Array, "T"]) -> KVCache:
    """Copy the keys and values of ``T`` tokens of all layers from slots to other, distinct slots.

    A target of ``N`` or more drops the token.
    """

    def copy(x):
        return x.at[target].set(x.at[source].get(mode="clip"), mode="drop")

    return jax.tree.map(copy, cache)
