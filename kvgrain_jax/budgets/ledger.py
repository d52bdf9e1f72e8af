"""The head-group pool of one engine: device state, and its counts mirrored on the host."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvgrain_jax.budgets import pool
from kvgrain_jax.budgets.pool import HeadPoolGeometry
from kvgrain_jax.errors import PoolCorrupted
from kvgrain_jax.pools import hot

Counts = Int[np.ndarray, " n_groups"]
Table = Int[Array, "n_groups T"]

_reserve = jax.jit(pool.reserve, donate_argnums=0)
_release = jax.jit(pool.release, donate_argnums=0)
_take_slab = jax.jit(hot.allocate, donate_argnums=0)
_return_slab = jax.jit(hot.release, donate_argnums=0)


class HeadLedger:
    """Pages of all head groups: one device call takes or returns those of a whole request.

    Args:
      geometry: sizes of the pool.
      n_groups: head groups of a request.
      width: ``T``, pages that one group of a request can have at most.

    Attributes:
      kv: keys and values; the engine's programs update them in place.
      free: free pages, known without asking the device.
      slab_rows: single-head rows of live slabs.
    """

    def __init__(self, geometry: HeadPoolGeometry, *, n_groups: int, width: int):
        self.geometry = geometry
        self.kv = pool.init(geometry)
        self.free = geometry.n_pages - geometry.n_hot_pages
        self.slab_rows = 0
        self._pages = pool.init_pages(geometry)
        self._slabs = pool.init_slabs(geometry)
        self._empty = partial(pool.empty_table, n_groups, width)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of keys and values of the pages that requests hold."""
        total = self.geometry.n_pages - self.geometry.n_hot_pages
        return (total - self.free) * self.geometry.page_bytes

    def reserve(
        self, counts: Counts, *, held: Counts | None = None, table: Table | None = None
    ) -> Table | None:
        """Page table with ``counts`` pages in each group; None, and no change, where none fits.

        Args:
          counts: pages that each group shall hold, at most ``T``.
          held: pages that each group of ``table`` holds, at most as many.
          table: table to extend; an empty one where None.

        Raises:
          PoolCorrupted: the device has fewer free pages than the host counted.
        """
        held = np.zeros_like(counts) if held is None else held
        need = int((counts - held).sum())
        if need > self.free:
            return None
        old = self._empty() if table is None else table
        self._pages, new, ok = _reserve(self._pages, old, _int32(held), _int32(counts))
        if not ok:
            raise PoolCorrupted(f"{self.free} pages are counted as free, {need} could not be had.")
        self.free -= need
        return new

    def release(self, table: Table, n_pages: int) -> None:
        """Return the pages that a table names; entries of -1 are skipped.

        Args:
          table: the pages.
          n_pages: how many they are.

        Raises:
          PoolCorrupted: some of them are free already.
        """
        self._pages, ok = _release(self._pages, table)
        if not ok:
            raise PoolCorrupted("Pages of a head group were freed twice.")
        self.free += n_pages

    def take_slab(self, n_rows: int) -> int | None:
        """First single-head row of a slab of ``n_rows``; None where there is no room for it."""
        self._slabs, base = _take_slab(self._slabs, jnp.int32(n_rows))
        if int(base) < 0:
            return None
        self.slab_rows += n_rows
        return int(base)

    def return_slab(self, base: int, n_rows: int) -> None:
        """Free a slab.

        Raises:
          PoolCorrupted: it is free already.
        """
        self._slabs, ok = _return_slab(self._slabs, jnp.int32(base), jnp.int32(n_rows))
        if not ok:
            raise PoolCorrupted("A slab of a shared prefix was freed twice.")
        self.slab_rows -= n_rows

    def check_integrity(self, tables: list[Table]) -> None:
        """Check that free pages and those of ``tables`` are all pages, each once; reads the device.

        Raises:
          PoolCorrupted: they are not.
        """
        n_free = int(self._pages.n_free)
        named = [np.asarray(self._pages.free)[:n_free]]
        named += [np.asarray(table)[np.asarray(table) >= 0] for table in tables]
        found = np.sort(np.concatenate(named))
        if n_free != self.free:
            raise PoolCorrupted(f"{n_free} pages are free, {self.free} are counted as such.")
        if not np.array_equal(found, np.arange(self.geometry.n_hot_pages, self.geometry.n_pages)):
            raise PoolCorrupted("Some pages are lost, or belong to two requests.")


def _int32(counts: Counts) -> Int[Array, " n_groups"]:
    return jnp.asarray(counts, jnp.int32)
