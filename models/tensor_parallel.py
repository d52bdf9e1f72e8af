"""How the decoder's weights are cut for the ranks of a mesh: one table, Megatron style.

A rank holds whole KV heads with their query heads, a run of the feed-forward features, and a run of
the vocabulary. The matmuls that end a branch read only what the rank computed, so a layer needs two
sums over the ranks (source: Megatron-LM, arXiv:1909.08053, section 3).
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Shaped

from kvgrain_jax.errors import ConfigError
from kvgrain_jax.sharding import TP
from models.config import ModelConfig

# The axis along which a tensor of each kind is cut; others are whole on every rank. Kinds are
# those of the decoder, and those of checkpoint files that it joins.
_CUT_AXIS = {
    "embedding": 0,
    "head": 0,
    "attention.qkv": 0,
    "attention.query": 0,
    "attention.key": 0,
    "attention.value": 0,
    "attention.output": 1,
    "ffn.gate_up": 1,
    "ffn.gate": 0,
    "ffn.up": 0,
    "ffn.down": 1,
}


def parallel_config(config: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """Returns the model that the ranks of a mesh run together.

    It is ``config`` itself, unless there are more ranks than KV heads. Then each KV head is held by
    several ranks, as KV heads of their own with a share of its query heads.

    Raises:
      ConfigError: heads, feed-forward features or vocabulary cannot be cut into equal parts.
    """
    ranks = 1 if mesh is None else mesh.shape[TP]
    copies = max(1, ranks // config.kv_heads)
    group = config.heads // config.kv_heads
    if config.kv_heads * copies % ranks:
        raise ConfigError(
            f"{config.kv_heads} KV heads cannot be spread over {ranks} devices; give a tensor "
            "parallelism that divides the KV heads or is a multiple of them."
        )
    if group % copies:
        raise ConfigError(
            f"Over {ranks} devices each of the {config.kv_heads} KV heads is held {copies} times, "
            f"but its {group} query heads cannot be shared by {copies}; use fewer devices."
        )
    for what, size in (("feed-forward features", config.ffn), ("vocabulary", config.vocabulary)):
        if size % ranks:
            raise ConfigError(
                f"The {what} ({size}) cannot be cut into {ranks} equal parts; use a number of "
                "devices that divides it."
            )
    return dataclasses.replace(config, kv_heads=config.kv_heads * copies)


def kind(name: str) -> str:
    """Returns a weight's name without layer and ``weight`` or ``bias``, e.g. ``attention.qkv``."""
    return re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", name)


def partition(name: str) -> PartitionSpec:
    """Returns how the weight ``name``, of the decoder or of a checkpoint file, is cut."""
    axis = _CUT_AXIS.get(kind(name))
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TP)


def params_spec(names: Iterable[str]) -> dict[str, PartitionSpec]:
    """Returns how each of the decoder's weights is cut."""
    return {name: partition(name) for name in names}


def placement(name: str, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding | None:
    """Returns where a weight lies: cut over the mesh; None, the default device, without a mesh.

    KV heads of a checkpoint that cannot be cut, being fewer than the ranks, lie whole on each.
    """
    if mesh is None:
        return None
    parts = zip(shape, partition(name), strict=False)
    fits = all(axis is None or size % mesh.shape[axis] == 0 for size, axis in parts)
    return NamedSharding(mesh, partition(name) if fits else PartitionSpec())


def target(name: str, shape: tuple[int, ...], dtype: Any, mesh: Mesh | None) -> Any:
    """Returns what Orbax wants to know of a tensor that it shall read."""
    place = placement(name, shape, mesh) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def replicate_kv_heads(
    qkv: Shaped[Any, "K group_and_2 *rest"], copies: int
) -> Shaped[Any, "more_K fewer_and_2 *rest"]:
    """Makes ``copies`` KV heads of each, which divide its query heads among them.

    Args:
      qkv: ``[K, G + 2, ...]``, the weight or bias of ``Attention.qkv``; NumPy or JAX.
      copies: divides ``G``.

    Returns:
      ``[K * copies, G / copies + 2, ...]``; query heads keep their order.
    """
    if copies == 1:
        return qkv
    heads, group = qkv.shape[0], qkv.shape[1] - 2
    xp = qkv.__array_namespace__()
    queries = qkv[:, :group].reshape(heads * copies, group // copies, *qkv.shape[2:])
    return xp.concat([queries, xp.repeat(qkv[:, group:], copies, axis=0)], axis=1)
