"""KV buffers: one pair of arrays per layer over the one index space of slots."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvgrain_jax.pools.geometry import PoolGeometry
from pallas_kernels import append_kv, rope_append


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
    return _with_layer(cache, layer, *append_kv(cache.k[layer], cache.v[layer], k, v, slots))


def write_projected(
    cache: KVCache,
    layer: int,
    slots: Int[Array, "T"],
    qkv: Float[Array, "T K G_and_2 D"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    norms: tuple[Float[Array, "D"], Float[Array, "D"]] | None = None,
    eps: float = 0.0,
) -> tuple[KVCache, Float[Array, "T H D"]]:
    """Encode positions, write keys and values as ``write`` does, and return the queries.

    See ``pallas_kernels.rope_append``.
    """
    k, v, q = rope_append(cache.k[layer], cache.v[layer], qkv, cos, sin, slots, norms, eps=eps)
    return _with_layer(cache, layer, k, v), q


def _with_layer(cache: KVCache, layer: int, k: Array, v: Array) -> KVCache:
    return KVCache(
        k=(*cache.k[:layer], k, *cache.k[layer + 1 :]),
        v=(*cache.v[:layer], v, *cache.v[layer + 1 :]),
    )


def copy_slots(cache: KVCache, source: Int[Array, "T"], target: Int[Array, "T"]) -> KVCache:
    """Copy the keys and values of ``T`` tokens of all layers from slots to other, distinct slots.

    A target of ``N`` or more drops the token.
    """

    def copy(x):
        return x.at[target].set(x.at[source].get(mode="clip"), mode="drop")

    return jax.tree.map(copy, cache)
