"""COLD pool: pages from a stack of free page numbers.

All functions are pure and work under ``jax.jit``; what does not fit or makes no sense returns the
state unchanged and ``ok`` False. Source: GraniKV §3.3.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColdState:
    """State of the COLD pool.

    Attributes:
      free: stack of free page numbers, int32; entries ``[0, n_free)`` count. It has room for
        every page of the index space, because HOT pages can be lent.
      n_free: free pages, int32.
    """

    free: Int[Array, "pages"]
    n_free: Int[Array, ""]


def init(n_pages: int, first_page: int) -> ColdState:
    """A COLD pool of the pages ``[first_page, n_pages)``, all free, lowest number on top."""
    own = jnp.arange(n_pages - 1, first_page - 1, -1, dtype=jnp.int32)
    lent = jnp.full(first_page, -1, jnp.int32)
    return ColdState(free=jnp.concatenate([own, lent]), n_free=jnp.int32(n_pages - first_page))


def allocate(
    state: ColdState, need: Bool[Array, "M"]
) -> tuple[ColdState, Int[Array, "M"], Bool[Array, ""]]:
    """Pop one page for every True of ``need``.

    Returns:
      ``(state, pages, ok)``; ``pages`` is -1 where none was needed. Where there are fewer free
      pages than needed, ``ok`` is False, all pages are -1 and the state is unchanged.
    """
    count = jnp.sum(need, dtype=jnp.int32)
    ok = count <= state.n_free
    rank = jnp.cumsum(need, dtype=jnp.int32) - 1
    pages = state.free.at[state.n_free - 1 - rank].get(mode="clip")
    n_free = jnp.where(ok, state.n_free - count, state.n_free)
    return (
        dataclasses.replace(state, n_free=n_free),
        jnp.where(need & ok, pages, -1),
        ok,
    )


def allocate_run(state: ColdState, n: Int[Array, ""] | int) -> tuple[ColdState, Int[Array, ""]]:
    """Take ``n`` consecutive pages out of the stack, the highest that there are.

    Returns:
      ``(state, first)``: the first of the pages; -1, and the state unchanged, where no ``n`` free pages
      follow each other or ``n`` is below 1.
    """
    n_pages = state.free.shape[0]
    place = jnp.arange(n_pages, dtype=jnp.int32)
    is_free = place < state.n_free
    ascending = jnp.sort(jnp.where(is_free, state.free, n_pages))
    last = ascending.at[place + n - 1].get(mode="fill", fill_value=n_pages)
    begins = (last < n_pages) & (last - ascending == n - 1)
    ok = jnp.any(begins) & (n >= 1)
    first = jnp.where(ok, jnp.max(jnp.where(begins, ascending, -1)), -1)
    kept = is_free & ~(ok & (state.free >= first) & (state.free < first + n))
    target = jnp.where(kept, jnp.cumsum(kept, dtype=jnp.int32) - 1, n_pages)
    return (
        ColdState(
            free=state.free.at[target].set(state.free, mode="drop"),
            n_free=jnp.sum(kept, dtype=jnp.int32),
        ),
        first,
    )


def release(state: ColdState, pages: Int[Array, "M"]) -> tuple[ColdState, Bool[Array, ""]]:
    """Push pages back; entries of -1 are skipped.

    Returns:
      ``(state, ok)``; ``ok`` False and the state unchanged where a page is free already, is named
      twice, or does not exist.
    """
    n_pages = state.free.shape[0]
    valid = pages != -1
    is_free = jnp.arange(n_pages, dtype=jnp.int32) < state.n_free
    count = jnp.zeros(n_pages, jnp.int32)
    count = count.at[jnp.where(is_free, state.free, n_pages)].add(1, mode="drop")
    count = count.at[jnp.where(valid & (pages >= 0), pages, n_pages)].add(1, mode="drop")
    exists = jnp.all(~valid | ((pages >= 0) & (pages < n_pages)))
    ok = exists & jnp.all(count <= 1)
    place = jnp.where(valid & ok, state.n_free + jnp.cumsum(valid, dtype=jnp.int32) - 1, n_pages)
    return (
        ColdState(
            free=state.free.at[place].set(pages, mode="drop"),
            n_free=state.n_free + jnp.where(ok, jnp.sum(valid, dtype=jnp.int32), 0),
        ),
        ok,
    )
