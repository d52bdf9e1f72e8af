"""Do pools, index and running requests agree? Every slot has one owner, every count is right."""

from collections.abc import Sequence

import jax
import numpy as np

from kvgrain_jax.errors import PoolCorrupted
from kvgrain_jax.pools import PoolGeometry, PoolState
from kvgrain_jax.prefix.node import Hot
from kvgrain_jax.prefix.radix import RadixIndex
from kvgrain_jax.prefix.reservation import Reservation


def check(
    geometry: PoolGeometry,
    pools: PoolState,
    index: RadixIndex,
    holders: Sequence[tuple[Reservation, np.ndarray]],
) -> None:
    """Check that the slots are partitioned into HOT live, HOT free, lent, COLD free, COLD live.

    Args:
      geometry: sizes of the pools.
      pools: the allocators.
      index: the radix tree, checked as well.
      holders: each running request with the page table of its context, ``held_pages`` long.

    Raises:
      PoolCorrupted: a slot has no owner or two, or a page table names a wrong page.
    """
    page = geometry.page_size
    hot, cold = pools.hot, pools.cold
    bump, limit, n_free = (int(x) for x in (hot.bump, hot.limit, cold.n_free))
    range_base, range_size, free = jax.device_get((hot.range_base, hot.range_size, cold.free))
    owners = np.zeros(geometry.n_slots, np.int64)

    def own_range(base: int, length: int) -> None:
        owners[base : base + length] += 1

    def own_pages(pages: np.ndarray) -> None:
        slots = np.asarray(pages, np.int64)[:, None] * page + np.arange(page)[None, :]
        np.add.at(owners, slots.reshape(-1), 1)

    owned = index.check_integrity()
    for base, length in owned.hot.tolist():
        own_range(base, length)
    own_pages(owned.cold)
    for base, length in zip(range_base.tolist(), range_size.tolist(), strict=True):
        if length:
            own_range(base, length)
    own_range(bump, limit - bump)
    own_pages(free[:n_free])
    for reservation, pages in holders:
        start = reservation.node.end
        if not np.array_equal(pages[: start // page], index.pages(reservation.node)):
            raise PoolCorrupted(
                f"A page table differs from the index in the first {start} tokens, of which the "
                f"index owns the KV: {pages[: start // page]}."
            )
        slab = reservation.slab
        if slab and isinstance(slab.tag, Hot):
            own_range(slab.tag.base, slab.length)
            start = slab.stop
        own_pages(pages[start // page :])
    wrong = np.flatnonzero(owners != 1)
    if wrong.size:
        raise PoolCorrupted(
            f"{wrong.size} slots do not have exactly one owner; slot {wrong[0]} has "
            f"{owners[wrong[0]]} (HOT ends at {limit}, bump pointer {bump})."
        )
