"""The devices that run one model together: mesh, placement of arrays, and sampling over ranks.

A mesh has two axes. The devices along ``TP`` (the ranks) hold one model together: its KV heads,
feed-forward features and vocabulary are cut into equal parts, one a rank, and so are the KV buffers;
pool bookkeeping, batch and plans are whole on every rank. Along ``DATA`` lie replicas of all that.
The mesh may span several processes (``jax.distributed``): each then runs the same host code, and
what the host decides by its clock comes from process 0 by ``broadcast``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from kvgrain_jax.errors import ConfigError

TP = "tp"
DATA = "data"

# How arrays are cut: whole on every device; KV buffers ``[N, K, D]`` by KV head.
REPLICATED = PartitionSpec()
KV_HEADS = PartitionSpec(None, TP, None)


def make_mesh(tp: int, replicas: int = 1) -> Mesh:
    """Arranges the first ``replicas * tp`` devices of all processes, ranks side by side.

    Args:
      tp: ranks of tensor parallelism.
      replicas: copies of the model.

    Raises:
      ConfigError: a number is below one, there are fewer devices, or a process would have none.
    """
    if tp < 1 or replicas < 1:
        raise ConfigError(f"tp is {tp} and replicas is {replicas}; give at least 1 of each.")
    devices = jax.devices()
    if tp * replicas > len(devices):
        raise ConfigError(
            f"{replicas} replicas of {tp} devices were asked for; there are {len(devices)} devices "
            f"({devices[0].platform}). On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N "
            "makes N of one."
        )
    used = np.array(devices[: tp * replicas]).reshape(replicas, tp)
    idle = set(range(jax.process_count())) - {device.process_index for device in used.flat}
    if idle:
        raise ConfigError(
            f"{tp * replicas} devices leave process {min(idle)} without one; use all "
            f"{len(devices)} devices or start fewer processes."
        )
    return Mesh(used, (DATA, TP))


def shardings(mesh: Mesh, spec: Any) -> Any:
    """Returns the sharding of every ``PartitionSpec`` in a pytree, e.g. for ``out_shardings``."""
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf), spec, is_leaf=is_spec)


def put(tree: Any, places: Sharding | Any | None) -> Any:
    """Places arrays of the host, each device receiving its part only.

    Args:
      tree: pytree of NumPy or JAX arrays, equal in every process.
      places: a sharding for all, or a pytree of them that is a prefix of ``tree``; None for the
        default device.
    """
    if places is None or jax.process_count() == 1:
        return jax.device_put(tree, places)

    def put_all(place: Sharding, subtree: Any) -> Any:
        return jax.tree.map(lambda array: _put_parts(np.asarray(array), place), subtree)

    is_place = lambda leaf: isinstance(leaf, Sharding)  # noqa: E731
    return jax.tree.map(put_all, places, tree, is_leaf=is_place)


def fetch(tree: Any) -> Any:
    """Returns arrays that are whole on every device as NumPy arrays, in any number of processes.

    Raises:
      ValueError: an array is cut over devices of which this process sees only some.
    """
    return jax.device_get(tree)


def broadcast(tree: Any) -> Any:
    """Returns the numbers of process 0 in every process, as NumPy arrays of the same dtype.

    All processes must call it, with arrays of the same shapes and dtypes; for decisions that depend
    on the clock or on what only one process knows. Costs a small collective; nothing with one
    process.
    """
    arrays = jax.tree.map(np.asarray, tree)
    if jax.process_count() == 1:
        return arrays
    # As bytes: JAX would round float64 and int64.
    raw = jax.tree.map(lambda x: np.frombuffer(x.tobytes(), np.uint8), arrays)
    received = multihost_utils.broadcast_one_to_all(raw)
    return jax.tree.map(
        lambda x, y: np.frombuffer(np.asarray(y).tobytes(), x.dtype).reshape(x.shape),
        arrays,
        received,
    )


def sample_sharded(
    sample: Callable[..., Int[Array, "R"]],
    logits: Float[Array, "R part"],
    *of_rows: Array,
    axis: str | None,
) -> Int[Array, "R"]:
    """Samples from logits of which each rank has its part of the vocabulary.

    The ranks exchange logits so that each samples its share of the rows from whole logits. Where
    the rows are no multiple of the ranks, every rank samples all of them.

    Args:
      sample: ``sample(logits, *of_rows) -> tokens``, row by row.
      logits: this rank's part, in the order of the ranks.
      *of_rows: what ``sample`` needs of each row, ``[R, ...]``, equal on all ranks.
      axis: mesh axis of the ranks, inside ``shard_map``; None if the logits are whole.

    Returns:
      The tokens of all rows, equal on all ranks.
    """
    if axis is None:
        return sample(logits, *of_rows)
    ranks, rows = lax.axis_size(axis), logits.shape[0]
    if rows % ranks:
        return sample(lax.all_gather(logits, axis, axis=1, tiled=True), *of_rows)
    whole = lax.all_to_all(logits, axis, split_axis=0, concat_axis=1, tiled=True)
    share = rows // ranks
    start = lax.axis_index(axis) * share
    own = [lax.dynamic_slice_in_dim(x, start, share) for x in of_rows]
    return lax.all_gather(sample(whole, *own), axis, tiled=True)


def greedy_sharded(logits: Float[Array, "R part"], *, axis: str) -> Int[Array, "R"]:
    """The most likely tokens from logits of which each rank has its part of the vocabulary.

    The ranks exchange one candidate a row instead of logits. Of equal logits the lowest token id
    wins.

    Args:
      logits: this rank's part, in the order of the ranks.
      axis: mesh axis of the ranks, inside ``shard_map``.

    Returns:
      The tokens of all rows, int32, equal on all ranks.
    """
    own = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    value = jnp.take_along_axis(logits, own[:, None], axis=1)[:, 0]
    token = own + lax.axis_index(axis) * logits.shape[1]
    values, tokens = lax.all_gather((value, token), axis)
    return jnp.take_along_axis(tokens, jnp.argmax(values, axis=0)[None], axis=0)[0]


def _put_parts(array: np.ndarray, place: Sharding) -> Array:
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])
