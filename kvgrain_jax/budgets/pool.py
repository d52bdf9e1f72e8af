"""The head-group pool: rows of ``[G_h, D]`` in pages, and slabs of single heads.

A page holds ``page_size`` rows; a row has a column for each of the ``G_h`` heads of a group, be
they of one layer or of several, so one pair of arrays serves all layers and one stack of free pages
all groups. A request holds a page table for each group, ``[n_groups, T]``, taken in one call and
given back in one call. Reading the rows head by head, ``[N * G_h, D]``, the pool also holds HOT
slabs: runs of one head's tokens one behind the other, for prefixes that many requests share.

    slots:       0                 n_hot                          N
                 | slabs of heads  | pages of head groups         |

All functions are pure and work under ``jax.jit``. Source: Tangram §4.2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvgrain_jax.errors import ConfigError
from kvgrain_jax.pools import cold, hot

PAGE_SIZES = (1, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class HeadPoolGeometry:
    """Sizes of a head-group pool.

    Attributes:
      group_size: ``G_h``, columns of a row.
      head_dim: ``D``.
      n_pages: pages in all.
      page_size: rows of a page.
      n_hot_pages: pages at the front that hold slabs instead; 0 for none.
      slab_align: slabs and the runs of heads in them begin at a multiple of so many single-head
        rows (the kernels' KV tile).
      max_slabs: live slabs at most.
      dtype: of keys and values.

    Raises:
      ConfigError: a size is out of range.
    """

    group_size: int
    head_dim: int
    n_pages: int
    page_size: int = 16
    n_hot_pages: int = 0
    slab_align: int = 64
    max_slabs: int = 64
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        for name in ("group_size", "head_dim", "n_pages", "slab_align", "max_slabs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive number.")
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size is {self.page_size}; choose one of {PAGE_SIZES}.")
        if not 0 <= self.n_hot_pages <= self.n_pages:
            raise ConfigError(
                f"n_hot_pages is {self.n_hot_pages}; give a number in [0, {self.n_pages}]."
            )
        if self.n_rows >= 2**31:
            raise ConfigError(
                f"{self.n_slots} slots of {self.group_size} heads are {self.n_rows} rows; rows are "
                "int32, so at most 2**31 - 1."
            )

    @property
    def n_slots(self) -> int:
        """``N``, slots of the pool; each holds a row of ``G_h`` heads."""
        return self.n_pages * self.page_size

    @property
    def n_rows(self) -> int:
        """Single-head rows of the pool."""
        return self.n_slots * self.group_size

    @property
    def n_hot_rows(self) -> int:
        """Single-head rows in front that hold slabs."""
        return self.n_hot_pages * self.page_size * self.group_size

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of one page."""
        item = jnp.dtype(self.dtype).itemsize
        return 2 * self.page_size * self.group_size * self.head_dim * item

    @classmethod
    def from_bytes(cls, n_bytes: int, **fields: Any) -> "HeadPoolGeometry":
        """Geometry of the pages whose keys and values fit in ``n_bytes``.

        Args:
          n_bytes: bytes of keys and values.
          **fields: the other attributes, without ``n_pages`` and ``n_hot_pages``.

        Raises:
          ConfigError: not one page fits, or a size is out of range.
        """
        n_pages = n_bytes // cls(n_pages=1, **fields).page_bytes
        if n_pages < 1:
            raise ConfigError(f"{n_bytes} bytes hold no page of a head group.")
        return cls(n_pages=n_pages, **fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadKV:
    """Keys and values of every head of every slot, and what compression knows of them.

    Attributes:
      k: keys after position encoding, ``[N, G_h, D]``.
      v: values, ``[N, G_h, D]``.
      scores: importance of each, float32; larger is kept longer.
      positions: position of each in its sequence, int32: rows are in no particular order.
    """

    k: Float[Array, "N G_h D"]
    v: Float[Array, "N G_h D"]
    scores: Float[Array, "N G_h"]
    positions: Int[Array, "N G_h"]


def init(geometry: HeadPoolGeometry) -> HeadKV:
    """Zero keys and values: a stale NaN times a probability of zero would be NaN."""
    shape = (geometry.n_slots, geometry.group_size)
    return HeadKV(
        k=jnp.zeros((*shape, geometry.head_dim), geometry.dtype),
        v=jnp.zeros((*shape, geometry.head_dim), geometry.dtype),
        scores=jnp.zeros(shape, jnp.float32),
        positions=jnp.zeros(shape, jnp.int32),
    )


def init_pages(geometry: HeadPoolGeometry) -> cold.ColdState:
    """The allocator of pages, all free."""
    return cold.init(geometry.n_pages, geometry.n_hot_pages)


def init_slabs(geometry: HeadPoolGeometry) -> hot.HotState:
    """The allocator of slabs, in single-head rows, all free."""
    return hot.init(geometry.n_hot_rows, max_slabs=geometry.max_slabs, align=geometry.slab_align)


def reserve(
    pages: cold.ColdState,
    table: Int[Array, "n_groups T"],
    held: Int[Array, "n_groups"],
    counts: Int[Array, "n_groups"],
) -> tuple[cold.ColdState, Int[Array, "n_groups T"], Bool[Array, ""]]:
    """Take the pages that all groups of a request need beyond those that they hold.

    Args:
      pages: the allocator.
      table: page table of the request, -1 behind the pages of each group.
      held: pages that each group holds.
      counts: pages that each group shall hold.

    Returns:
      ``(pages, table, ok)``. Where the pool has too few free pages or a group would need more than
      ``T``, ``ok`` is False and allocator and table are unchanged.
    """
    column = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :]
    need = (column >= held[:, None]) & (column < counts[:, None])
    fits = jnp.all(counts <= table.shape[1])
    taken, got, ok = cold.allocate(pages, (need & fits).reshape(-1))
    return taken, jnp.where(need & fits & ok, got.reshape(need.shape), table), ok & fits


def empty_table(n_groups: int, width: int) -> Int[Array, "n_groups T"]:
    """Page table of a request that holds no page; ``width`` is ``T``."""
    return jnp.full((n_groups, width), -1, jnp.int32)


def release(
    pages: cold.ColdState, table: Int[Array, "n_groups T"]
) -> tuple[cold.ColdState, Bool[Array, ""]]:
    """Give back every page of a table; entries of -1 are skipped. See ``cold.release``."""
    return cold.release(pages, table.reshape(-1))


def rows_of(
    table: Int[Array, "*heads T"],
    columns: Int[Array, "*heads"],
    tokens: Int[Array, "*heads S"],
    *,
    page_size: int,
    group_size: int,
) -> Int[Array, "*heads S"]:
    """Single-head rows of tokens, by the page table of each head's group and its column there.

    Args:
      table: page table of each head's group.
      columns: column of each head.
      tokens: places in the head's list of tokens, in ``[0, T * page_size)``; what lies outside is
        clipped, so callers mask it.
      page_size: rows of a page.
      group_size: ``G_h``.
    """
    page = jnp.take_along_axis(table, tokens // page_size, axis=-1, mode="clip")
    return (page * page_size + tokens % page_size) * group_size + columns[..., None]


def write(
    kv: HeadKV,
    rows: Int[Array, "M"],
    k: Float[Array, "M D"],
    v: Float[Array, "M D"],
    scores: Float[Array, "M"],
    positions: Int[Array, "M"],
) -> HeadKV:
    """Write single-head rows, in place when the pool is donated; a row ``>= N * G_h`` is dropped."""
    return write_vectors(write_notes(kv, rows, scores, positions), rows, k, v)


def write_vectors(
    kv: HeadKV, rows: Int[Array, "*M"], k: Float[Array, "*M D"], v: Float[Array, "*M D"]
) -> HeadKV:
    """Write keys and values only, as ``write`` does."""
    at = _slot_and_column(kv, rows)
    return dataclasses.replace(kv, k=_put(kv.k, at, k), v=_put(kv.v, at, v))


def write_notes(
    kv: HeadKV, rows: Int[Array, "*M"], scores: Float[Array, "*M"], positions: Int[Array, "*M"]
) -> HeadKV:
    """Write scores and positions only, as ``write`` does."""
    at = _slot_and_column(kv, rows)
    return dataclasses.replace(
        kv, scores=_put(kv.scores, at, scores), positions=_put(kv.positions, at, positions)
    )


def _put(pool: Array, at: tuple[Array, Array], values: Array) -> Array:
    return pool.at[at].set(values.astype(pool.dtype), mode="drop")


def write_scores(
    kv: HeadKV, rows: Int[Array, "*M"], live: Bool[Array, "*M"], scores: Float[Array, "*M"]
) -> HeadKV:
    """Replace the scores of the single-head rows that are ``live``."""
    at = _slot_and_column(kv, jnp.where(live, rows, kv.scores.size))
    return dataclasses.replace(kv, scores=kv.scores.at[at].set(scores, mode="drop"))


def read_vectors(
    kv: HeadKV, rows: Int[Array, "*M"]
) -> tuple[Float[Array, "*M D"], Float[Array, "*M D"]]:
    """Keys and values of single-head rows."""
    at = _slot_and_column(kv, rows)
    return kv.k.at[at].get(mode="clip"), kv.v.at[at].get(mode="clip")


def read_notes(kv: HeadKV, rows: Int[Array, "*M"]) -> tuple[Float[Array, "*M"], Int[Array, "*M"]]:
    """Scores and positions of single-head rows."""
    at = _slot_and_column(kv, rows)
    return kv.scores.at[at].get(mode="clip"), kv.positions.at[at].get(mode="clip")


def _slot_and_column(kv: HeadKV, rows: Int[Array, "*M"]) -> tuple[Array, Array]:
    return rows // kv.scores.shape[1], rows % kv.scores.shape[1]
