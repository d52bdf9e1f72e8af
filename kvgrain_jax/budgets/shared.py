"""Both axes: a shared prefix is compressed once, and every sharer reads the same survivors.

A prefix is compressed on its own, before any question behind it is seen. What each head keeps then
moves into one HOT slab, head behind head, each a run of consecutive single-head rows:

    slab:  | layer 0, head 0 ...... | layer 0, head 1 . | layer 0, head 2 ... |     | layer L - 1 ... |

A step reads the survivors of a head once for all sharers, by segment attention over runs of any
lengths (``kvgrain_jax.budgets.ragged``).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvgrain_jax.attention.plan import (
    DENSE_TILING,
    KernelShape,
    Tiling,
    make_work_list,
    work_capacity,
)
from kvgrain_jax.attention.prefill import SegmentWork
from kvgrain_jax.attention.segments import Segment
from kvgrain_jax.budgets import pool, ragged
from kvgrain_jax.budgets.pool import HeadKV
from pallas_kernels.row_partials import RowPartials


@dataclasses.dataclass(eq=False)
class SharedPrefix:
    """A prefix in its slab.

    Attributes:
      n_tokens: its tokens before compression; those of a sharer begin at this position.
      base: first single-head row of the slab.
      size: single-head rows of the slab.
      starts: first row of each head's run.
      lengths: survivors of each head.
      ready: whether the slab is filled.
      users: requests that wait or run with it.
    """

    n_tokens: int
    base: int
    size: int
    starts: Int[np.ndarray, "L K"]
    lengths: Int[np.ndarray, "L K"]
    ready: bool = False
    users: int = 0


def slab_layout(lengths: Int[np.ndarray, "L K"], align: int) -> tuple[Int[np.ndarray, "L K"], int]:
    """Offset of each head's run in a slab, and the rows of the slab.

    Args:
      lengths: survivors of each head.
      align: runs begin at a multiple of so many rows.
    """
    ends = np.cumsum(-(-lengths.ravel() // align) * align)
    starts = np.concatenate([[0], ends[:-1]])
    return starts.reshape(lengths.shape), int(starts[-1] + lengths.ravel()[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadRuns:
    """Where the survivors of one prefix lie; no head has any where there is no prefix.

    Attributes:
      starts: first single-head row of each head's run.
      lengths: rows of it.
    """

    starts: Int[Array, "L K"]
    lengths: Int[Array, "L K"]


def runs_of(prefix: SharedPrefix | None, n_layers: int, n_kv_heads: int) -> HeadRuns:
    """The runs of a prefix on the device."""
    nothing = np.zeros((n_layers, n_kv_heads), np.int32)
    starts, lengths = (prefix.starts, prefix.lengths) if prefix else (nothing, nothing)
    return HeadRuns(jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32))


@partial(jax.jit, static_argnames="page_size", donate_argnames="kv")
def store_prefix(
    kv: HeadKV,
    table: Int[Array, "n_groups T"],
    lengths: Int[Array, "n_groups G_h"],
    starts: Int[Array, "n_groups G_h"],
    *,
    page_size: int,
) -> HeadKV:
    """Copy what every head of a request holds from its pages to a slab.

    Args:
      kv: the pool; donated.
      table: page table of each group.
      lengths: tokens of each member.
      starts: first single-head row of each member's run.
      page_size: rows of a page.
    """
    n_groups, group_size = lengths.shape
    n_places = table.shape[1] * page_size
    place = jnp.broadcast_to(jnp.arange(n_places, dtype=jnp.int32)[None, :], (group_size, n_places))

    def copy_group(group, kv):
        source = pool.rows_of(
            jnp.broadcast_to(table[group][None, :], (group_size, table.shape[1])),
            jnp.arange(group_size, dtype=jnp.int32),
            place,
            page_size=page_size,
            group_size=group_size,
        ).reshape(-1)
        live = place < lengths[group][:, None]
        target = jnp.where(live, starts[group][:, None] + place, kv.scores.size).reshape(-1)
        return pool.write(kv, target, *pool.read_vectors(kv, source), *pool.read_notes(kv, source))

    return lax.fori_loop(0, n_groups, copy_group, kv)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedRows:
    """Which rows of a batch share which runs.

    Attributes:
      order: the batch row at each place; sharers of a prefix are next to each other.
      place: the place of each batch row.
      works: the runs of all layers, and their sharers as rows of heads, see ``ragged.of_layer``.
    """

    order: Int[Array, "B"]
    place: Int[Array, "B"]
    works: SegmentWork


def share_rows(
    prefixes: Sequence[SharedPrefix | None],
    *,
    n_layers: int,
    n_kv_heads: int,
    n_rows_of_slabs: int,
    n_rows_of_pool: int,
    kernels: KernelShape | None = None,
) -> SharedRows:
    """Plan the shared part of a batch. Its shapes depend on everything but the prefixes.

    Args:
      prefixes: what each row of the batch shares.
      n_layers: ``L``.
      n_kv_heads: ``K``.
      n_rows_of_slabs: single-head rows that hold slabs.
      n_rows_of_pool: single-head rows of the pool.
      kernels: shape to schedule the GPU kernels for, see ``ragged.head_kernels``.
    """
    n_rows = len(prefixes)
    kinds = {id(prefix): i for i, prefix in enumerate(prefixes) if prefix}
    order = sorted(range(n_rows), key=lambda row: kinds.get(id(prefixes[row]), n_rows))
    runs: list[tuple[SharedPrefix, int, int]] = []
    for place, row in enumerate(order):
        prefix = prefixes[row]
        if prefix and runs and runs[-1][0] is prefix:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        elif prefix:
            runs.append((prefix, place, 1))
    capacity = n_rows * n_kv_heads
    tiling = Tiling(min(DENSE_TILING.row_tile, n_rows), DENSE_TILING.kv_tile)
    size = work_capacity(tiling, n_rows, n_rows_of_slabs, capacity)

    def work_of(layer: int) -> SegmentWork:
        segments = [
            Segment(
                int(prefix.starts[layer, head]),
                int(prefix.lengths[layer, head]),
                head * n_rows + first,
                n,
            )
            for prefix, first, n in runs
            for head in range(n_kv_heads)
        ]
        table = np.zeros((capacity, 4), np.int32)
        table[: len(segments)] = np.asarray(segments, np.int32).reshape(-1, 4)
        return SegmentWork(jnp.asarray(table), make_work_list(segments, tiling, size))

    works = ragged.schedule_layers(
        jax.tree.map(lambda *layers: jnp.stack(layers), *map(work_of, range(n_layers))),
        kernels,
        n_slots=n_rows_of_pool,
        n_rows=capacity,
        most_rows=n_rows,
        least_rows=1,
    )
    return SharedRows(
        order=jnp.asarray(order, jnp.int32),
        place=jnp.asarray(np.argsort(order), jnp.int32),
        works=works,
    )


def attend_shared(
    q: Float[Array, "B H D"],
    kv: HeadKV,
    layer: int | Int[Array, ""],
    shared: SharedRows,
    n_kv_heads: int,
) -> RowPartials:
    """Attention of each row to the survivors of its prefix, for ``head_group_decode`` to merge."""
    work = ragged.of_layer(shared.works, layer)
    found = ragged.attend_runs(q[shared.order], kv.k, kv.v, work, n_kv_heads=n_kv_heads)
    return dataclasses.replace(
        found, places=found.places[shared.place], counts=found.counts[shared.place]
    )
