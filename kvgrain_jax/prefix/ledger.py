"""The pools from the host: taking, freeing and lending slots, with counts that need no look at the device.

Every call goes through a pure function of ``kvgrain_jax.pools`` under ``jit``; the device state is
the truth, the counts here mirror it. A call of the device costs more than what it does there, so the
COLD pages of many requests can be taken and freed ``together``.
"""

import bisect
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvgrain_jax.errors import PoolCorrupted, PoolExhausted
from kvgrain_jax.pools import KVCache, PoolGeometry, PoolState, buffers, cold, hot, lending
from kvgrain_jax.prefix.node import Hot, Piece
from kvgrain_jax.sharding import KV_HEADS, REPLICATED, put

COPY_TOKENS = 1024  # tokens that one call of the copy into a slab moves

_allocate_slab = jax.jit(hot.allocate, donate_argnums=0)
_release_slab = jax.jit(hot.release, static_argnames="whole", donate_argnums=0)
_allocate_pages = jax.jit(cold.allocate, donate_argnums=0)
_allocate_run = jax.jit(cold.allocate_run, donate_argnums=0)
_release_pages = jax.jit(cold.release, donate_argnums=0)
_lend = jax.jit(lending.lend, donate_argnums=0)
_take_back = jax.jit(lending.take_back, donate_argnums=0)
_copy_slots = jax.jit(buffers.copy_slots, donate_argnums=0)


class PoolLedger:
    """Pools and KV buffers on the device, and the host's counts of them.

    Args:
      geometry: sizes of the pools.
      row_pages: pages of the longest context of a request.
      mesh: devices over which the KV heads are cut; None for the default device.

    Attributes:
      pools: HOT and COLD allocators; a look at them does first what has been gathered.
      kv: keys and values.
      cold_free: free COLD pages.
      outstanding: free COLD pages that are committed to running requests.
      lent: pages that HOT has lent to COLD.
    """

    def __init__(self, geometry: PoolGeometry, row_pages: int, mesh: Mesh | None = None):
        self.geometry = geometry
        self.row_pages = row_pages
        whole = parts = None
        if mesh is not None:
            whole, parts = NamedSharding(mesh, REPLICATED), NamedSharding(mesh, KV_HEADS)
        self._pools: PoolState = put(lending.init(geometry), whole)
        self._gathering = 0
        self._takes: list[np.ndarray] = []
        self._frees: list[np.ndarray] = []
        # Under jit each device makes its own part; made whole first, the pool might not fit.
        self.kv: KVCache = jax.jit(lambda: buffers.init(geometry), out_shardings=parts)()
        self.cold_free = geometry.n_pages - geometry.n_hot // geometry.page_size
        self.outstanding = 0
        self.lent = 0
        self._slabs: list[tuple[int, int]] = []

    @property
    def pools(self) -> PoolState:
        self.settle()
        return self._pools

    @pools.setter
    def pools(self, pools: PoolState) -> None:
        self._pools = pools

    @property
    def slabs(self) -> list[tuple[int, int]]:
        """``(base, live tokens)`` of each slab, by base."""
        return list(self._slabs)

    @property
    def hot_tokens(self) -> int:
        """HOT slots in live slabs."""
        return sum(tokens for _, tokens in self._slabs)

    @property
    def cold_tokens(self) -> int:
        """COLD slots in use, lent ones included."""
        page = self.geometry.page_size
        return (self.geometry.n_pages + self.lent - self.cold_free) * page - self.geometry.n_hot

    @property
    def spare(self) -> int:
        """Free COLD pages that are committed to nobody."""
        return self.cold_free - self.outstanding

    @property
    def hot_limit(self) -> int:
        """End of the HOT region as lending has left it."""
        return self.geometry.n_hot - self.lent * self.geometry.page_size

    @property
    def lent_range(self) -> tuple[int, int]:
        """Page numbers ``[first, stop)`` that HOT has lent."""
        page = self.geometry.page_size
        return self.hot_limit // page, self.geometry.n_hot // page

    def lent_in_use(self) -> int:
        """Lent pages that are not free; looks at the device."""
        first, stop = self.lent_range
        free = np.asarray(self.pools.cold.free)[: self.cold_free]
        return self.lent - int(np.count_nonzero((free >= first) & (free < stop)))

    def take_slab(self, n: int) -> int | None:
        """Take ``n`` contiguous HOT slots; the base, or None where they do not fit."""
        state, base = _allocate_slab(self.pools.hot, n)
        self.pools = dataclasses.replace(self.pools, hot=state)
        if int(base) < 0:
            return None
        bisect.insort(self._slabs, (int(base), n))
        return int(base)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Gather the COLD pages that are taken and freed inside into few calls of the device.

        The arrays given to ``take_pages`` are filled when the outermost block ends, or when something
        inside it needs the pools.
        """
        self._gathering += 1
        try:
            yield
        finally:
            self._gathering -= 1
            if not self._gathering:
                self.settle()

    def settle(self) -> None:
        """Do what has been gathered: first free pages, then take some.

        Raises:
          PoolCorrupted: one of the pages is free already.
        """
        frees, self._frees = self._frees, []
        takes, self._takes = self._takes, []
        done, sizes = [], []
        pages = np.concatenate([*frees, np.zeros(0, np.int32)])
        for start in range(0, pages.size, self.row_pages):
            part = pages[start : start + self.row_pages]
            padded = np.full(self.row_pages, -1, np.int32)
            padded[: part.size] = part
            state, ok = _release_pages(self._pools.cold, padded)
            self._pools = dataclasses.replace(self._pools, cold=state)
            done.append(ok)
            sizes.append(part.size)
        kept = [n for ok, n in zip(jax.device_get(done), sizes, strict=True) if not ok]
        if kept:
            self.cold_free -= sum(kept)
            raise PoolCorrupted(f"Some of the COLD pages {pages} are free already.")
        taken = []
        total = sum(array.size for array in takes)
        for start in range(0, total, self.row_pages):
            need = np.arange(self.row_pages) < total - start
            state, part, ok = _allocate_pages(self._pools.cold, need)
            self._pools = dataclasses.replace(self._pools, cold=state)
            taken.append((part, ok))
        taken = jax.device_get(taken)
        if not all(ok for _, ok in taken):
            raise PoolCorrupted(f"{total} COLD pages were counted as free and are not.")
        pages, start = np.concatenate([*(part for part, _ in taken), np.zeros(0, np.int32)]), 0
        for array in takes:
            array[:] = pages[start : start + array.size]
            start += array.size

    def take_pages(self, pages: np.ndarray) -> None:
        """Take as many COLD pages as ``pages`` (int32) is long, and write their numbers into it.

        Raises:
          PoolExhausted: fewer are free, or a request never holds so many; nothing was taken.
        """
        if pages.size > self.row_pages:
            raise PoolExhausted(
                f"{pages.size} COLD pages were asked for at once; one request holds at most "
                f"{self.row_pages}. Raise max_context."
            )
        if pages.size > self.cold_free:
            raise PoolExhausted(
                f"{pages.size} COLD pages were asked for and {self.cold_free} are free; let a "
                "request finish, or make the pool larger."
            )
        self.cold_free -= pages.size
        self._takes.append(pages)
        if not self._gathering:
            self.settle()

    def take_run(self, n: int) -> np.ndarray | None:
        """Take ``n`` consecutive COLD pages, int32 ``[n]``; None where there are none."""
        state, first = _allocate_run(self.pools.cold, n)
        self.pools = dataclasses.replace(self.pools, cold=state)
        if int(first) < 0:
            return None
        self.cold_free -= n
        return np.arange(int(first), int(first) + n, dtype=np.int32)

    def free_pages(self, pages: np.ndarray) -> None:
        """Give COLD pages back.

        Raises:
          PoolCorrupted: one of them is free already.
        """
        self.cold_free += len(pages)
        self._frees.append(np.asarray(pages, np.int32))
        if not self._gathering:
            self.settle()

    def free(self, pieces: Sequence[Piece]) -> None:
        """Give pieces back to the pools they lie in.

        Raises:
          PoolCorrupted: a part of them is free already.
        """
        cold_pages = [p.pages(self.geometry.page_size) for p in pieces if not p.is_hot]
        if cold_pages:
            self.free_pages(np.concatenate(cold_pages))
        # Slabs shrink from their ends, so the later pieces of a slab go first.
        hot_pieces = [(p.tag.base, p.length) for p in pieces if isinstance(p.tag, Hot)]
        for base, length in sorted(hot_pieces, reverse=True):
            self._free_slots(base, length)

    def set_cold(self, pool: cold.ColdState, n_free: int) -> None:
        """Take a COLD pool that a program on the device has changed, ``n_free`` of its pages free."""
        self._pools = dataclasses.replace(self._pools, cold=pool)
        self.cold_free = n_free

    def lend(self, pages: int) -> None:
        """Lend up to ``pages`` pages of unused HOT slots to COLD."""
        if pages > 0:
            self.pools, lent = _lend(self.pools, pages)
            self.cold_free += int(lent)
            self.lent += int(lent)

    def take_back(self) -> None:
        """Return lent pages to HOT if all are free; those that requests may still need stay lent."""
        if self.lent:
            self.pools, taken = _take_back(self.pools)
            self.cold_free -= int(taken)
            self.lent -= int(taken)
            self.lend(-self.spare)

    def copy_to_slab(self, pages: np.ndarray, base: int) -> None:
        """Copy the KV of the tokens of ``pages`` to the slots from ``base`` on, all layers."""
        page, n_slots = self.geometry.page_size, self.geometry.n_slots
        source = (pages[:, None] * page + np.arange(page, dtype=np.int32)[None, :]).reshape(-1)
        for start in range(0, max(source.size, 1), COPY_TOKENS):
            part = source[start : start + COPY_TOKENS]
            padded, target = (
                np.zeros(COPY_TOKENS, np.int32),
                np.full(COPY_TOKENS, n_slots, np.int32),
            )
            padded[: part.size] = part
            target[: part.size] = base + start + np.arange(part.size)
            self.kv = _copy_slots(self.kv, padded, target)

    def compile(self) -> None:
        """Compile every device call of the ledger by calls that change nothing."""
        self.take_slab(0)
        self.take_run(0)
        cold_state, _, _ = _allocate_pages(self.pools.cold, np.zeros(self.row_pages, bool))
        self.pools = dataclasses.replace(self.pools, cold=cold_state)
        nothing = np.full(self.row_pages, -1, np.int32)
        hot_state, _ = _release_slab(self.pools.hot, 0, 0, whole=True)
        hot_state, _ = _release_slab(hot_state, 0, 0, whole=False)
        cold_state, _ = _release_pages(self.pools.cold, nothing)
        self.pools = dataclasses.replace(self.pools, hot=hot_state, cold=cold_state)
        self.pools, _ = _lend(self.pools, 0)
        if not self.lent:
            self.pools, _ = _take_back(self.pools)
        dropped = np.full(COPY_TOKENS, self.geometry.n_slots, np.int32)
        self.kv = _copy_slots(self.kv, np.zeros(COPY_TOKENS, np.int32), dropped)

    def check_counts(self) -> None:
        """Check the host's counts against the device.

        Raises:
          PoolCorrupted: a count differs, or requests were promised more pages than are free.
        """
        counts = {
            "free COLD pages": (self.cold_free, self.pools.cold.n_free),
            "lent pages": (self.lent, lending.lent_pages(self.pools)),
            "slabs": (len(self._slabs), self.pools.hot.n_slabs),
            "free HOT tokens": (self.hot_limit - self.hot_tokens, hot.free_tokens(self.pools.hot)),
        }
        for name, (mirror, real) in counts.items():
            if mirror != int(real):
                raise PoolCorrupted(f"The host counts {mirror} {name}, the pools hold {real}.")
        if self.spare < 0:
            raise PoolCorrupted(
                f"{self.outstanding} pages are committed to requests, {self.cold_free} are free."
            )

    def _free_slots(self, base: int, length: int) -> None:
        i = bisect.bisect_right(self._slabs, (base, self.geometry.n_slots)) - 1
        slab, live = self._slabs.pop(i)
        rest = live - length
        if rest:  # the rest of the slab lives on, behind the freed part or in front of it
            bisect.insort(self._slabs, (slab + length if slab == base else slab, rest))
        state, ok = _release_slab(self.pools.hot, base, length, whole=rest == 0)
        self.pools = dataclasses.replace(self.pools, hot=state)
        if not ok:
            raise PoolCorrupted(
                f"Some of the HOT slots [{base}, {base + length}) are free already."
            )
