"""Lending: the HOT/COLD boundary moves at run time.

Unused HOT slots above the bump pointer become COLD pages while suffixes need room, and come back
when all of them are free again. Source: GraniKV §3.2 and B.12; moving the boundary at run time is
what the paper leaves as future work.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvgrain_jax.pools import cold, hot
from kvgrain_jax.pools.geometry import PoolGeometry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PoolState:
    """Who owns which slot of the one index space: a HOT and a COLD allocator.

    Attributes:
      hot: slabs in ``[0, hot.limit)``.
      cold: pages of ``[hot.limit, n_slots)``; those below ``n_hot`` are lent.
      n_hot: end of the HOT region when nothing is lent.
      page_size: tokens of a COLD page.
    """

    hot: hot.HotState
    cold: cold.ColdState
    n_hot: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})


def init(geometry: PoolGeometry) -> PoolState:
    """Both pools of ``geometry``, empty."""
    return PoolState(
        hot=hot.init(geometry.n_hot, max_slabs=geometry.max_slabs, align=geometry.slab_align),
        cold=cold.init(geometry.n_pages, geometry.n_hot // geometry.page_size),
        n_hot=geometry.n_hot,
        page_size=geometry.page_size,
    )


def lent_pages(state: PoolState) -> Int[Array, ""]:
    """Pages that HOT has lent to COLD, in use or free."""
    return (state.n_hot - state.hot.limit) // state.page_size


def lend(state: PoolState, n_pages: Int[Array, ""] | int) -> tuple[PoolState, Int[Array, ""]]:
    """Lend up to ``n_pages`` pages of the unused end of HOT to COLD.

    They go to the bottom of the free stack, so that COLD takes its own pages first and lent ones
    come back sooner.

    Returns:
      ``(state, lent)``: how many pages were lent; fewer than asked where HOT has fewer unused.
    """
    page = state.page_size
    lowest = (state.hot.bump + page - 1) // page
    limit = state.hot.limit // page
    lent = jnp.clip(jnp.asarray(n_pages, jnp.int32), 0, jnp.maximum(limit - lowest, 0))
    place = jnp.arange(state.cold.free.shape[0], dtype=jnp.int32)
    shifted = state.cold.free.at[place - lent].get(mode="clip")
    free = jnp.where(place < lent, limit - lent + place, shifted)
    return (
        dataclasses.replace(
            state,
            hot=dataclasses.replace(state.hot, limit=state.hot.limit - lent * page),
            cold=cold.ColdState(free=free, n_free=state.cold.n_free + lent),
        ),
        lent,
    )


def take_back(state: PoolState) -> tuple[PoolState, Int[Array, ""]]:
    """Return all lent pages to HOT if every one of them is free; else change nothing.

    Returns:
      ``(state, taken)``: how many pages came back, 0 where some are still in use.
    """
    lent = lent_pages(state)
    place = jnp.arange(state.cold.free.shape[0], dtype=jnp.int32)
    is_free = place < state.cold.n_free
    is_lent = is_free & (state.cold.free < state.n_hot // state.page_size)
    whole = jnp.sum(is_lent, dtype=jnp.int32) == lent
    kept_first = jnp.argsort(~(is_free & ~is_lent), stable=True)
    taken = jnp.where(whole, lent, 0)
    return (
        dataclasses.replace(
            state,
            hot=dataclasses.replace(
                state.hot, limit=jnp.where(whole, state.n_hot, state.hot.limit)
            ),
            cold=cold.ColdState(
                free=jnp.where(whole, state.cold.free[kept_first], state.cold.free),
                n_free=state.cold.n_free - taken,
            ),
        ),
        taken,
    )
