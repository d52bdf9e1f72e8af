"""HOT pool: contiguous slabs from a bump pointer and a first-fit list of free ranges.

    0            ranges            bump        limit          n_hot
    | slab | free | slab | slab    |  unused   |  lent to COLD  |

All functions are pure and work under ``jax.jit``; what does not fit or makes no sense returns the
state unchanged and says so (a base of -1, ``ok`` False). Source: GraniKV §3.2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_NO_RANGE = jnp.iinfo(jnp.int32).max  # base of an unused entry: sorts behind every free range


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HotState:
    """State of the HOT pool, all int32.

    Attributes:
      bump: first slot that no slab has reached yet; slots ``[bump, limit)`` are free.
      limit: end of the region. Lending moves it down, taking back moves it up.
      n_slabs: live slabs.
      range_base: first slots of the free ranges below ``bump``, ascending; unused entries last.
      range_size: tokens of each free range; 0 where unused. Between two slabs lies at most one
        free range, so ``max_slabs + 1`` entries can never overflow.
      align: slab bases are multiples of this many tokens.
    """

    bump: Int[Array, ""]
    limit: Int[Array, ""]
    n_slabs: Int[Array, ""]
    range_base: Int[Array, "R"]
    range_size: Int[Array, "R"]
    align: int = dataclasses.field(metadata={"static": True})


def init(n_hot: int, *, max_slabs: int = 256, align: int = 64) -> HotState:
    """An empty HOT pool of ``n_hot`` tokens."""
    return HotState(
        bump=jnp.int32(0),
        limit=jnp.int32(n_hot),
        n_slabs=jnp.int32(0),
        range_base=jnp.full(max_slabs + 1, _NO_RANGE, jnp.int32),
        range_size=jnp.zeros(max_slabs + 1, jnp.int32),
        align=align,
    )


def allocate(state: HotState, n: Int[Array, ""] | int) -> tuple[HotState, Int[Array, ""]]:
    """Take a slab of ``n`` consecutive slots: first fit among the free ranges, then the bump pointer.

    The base is aligned; the length is not padded. Slots skipped by the alignment stay free.

    Returns:
      ``(state, base)``; ``base = -1`` and the state unchanged where no slab of ``n`` tokens fits,
      ``max_slabs`` are live, or ``n < 1``.
    """
    n = jnp.asarray(n, jnp.int32)
    aligned = _align_up(jnp.where(state.range_size > 0, state.range_base, 0), state.align)
    fits = (state.range_size > 0) & (n <= state.range_base + state.range_size - aligned)
    in_range = jnp.any(fits)
    i = jnp.argmax(fits)
    bump_base = _align_up(state.bump, state.align)
    base = jnp.where(in_range, aligned[i], bump_base)

    # What is left of the range (or of the unused slots) before and behind the slab.
    gap_base = jnp.where(in_range, state.range_base[i], state.bump)
    rest_base = base + n
    rest_size = jnp.where(in_range, state.range_base[i] + state.range_size[i] - rest_base, 0)
    emptied = in_range & (jnp.arange(state.range_base.shape[0], dtype=jnp.int32) == i)
    range_base, range_size = _sorted_ranges(
        state,
        jnp.where(emptied, 0, state.range_size),
        (gap_base, base - gap_base),
        (rest_base, rest_size),
    )
    max_slabs = state.range_base.shape[0] - 1
    ok = (n >= 1) & (state.n_slabs < max_slabs) & (in_range | (n <= state.limit - bump_base))
    taken = dataclasses.replace(
        state,
        bump=jnp.where(in_range, state.bump, rest_base),
        n_slabs=state.n_slabs + 1,
        range_base=range_base,
        range_size=range_size,
    )
    return _where(ok, taken, state), jnp.where(ok, base, -1)


def release(
    state: HotState, base: Int[Array, ""] | int, n: Int[Array, ""] | int, *, whole: bool = True
) -> tuple[HotState, Bool[Array, ""]]:
    """Give back the slots ``[base, base + n)`` of a live slab.

    The range merges with both neighbours; a last range that touches the bump pointer pulls it back.

    Args:
      state: the pool.
      base: first slot to free.
      n: how many slots to free.
      whole: the slab ends here (its last part is freed). False shrinks a slab from its end: the
        part in front of ``base`` lives on.

    Returns:
      ``(state, ok)``; ``ok`` False and the state unchanged where a slot of the range is free
      already or never belonged to a slab, or ``n < 1``.
    """
    base, n = jnp.asarray(base, jnp.int32), jnp.asarray(n, jnp.int32)
    used = state.range_size > 0
    overlap = used & (state.range_base < base + n) & (base < state.range_base + state.range_size)
    ok = (n >= 1) & (base >= 0) & (n <= state.bump - base) & ~jnp.any(overlap)
    ok &= state.n_slabs >= 1

    range_base, range_size = _sorted_ranges(state, state.range_size, (base, n))
    # Neighbours that touch become one range: number the groups, then sum each.
    end = range_base + range_size
    touches = jnp.concatenate(
        [jnp.zeros(1, bool), (range_base[1:] == end[:-1]) & (range_size[1:] > 0)]
    )
    group = jnp.cumsum(~touches) - 1
    size = jnp.zeros_like(range_size).at[group].add(range_size)
    first = jnp.full_like(range_base, _NO_RANGE).at[group].min(range_base)
    first = jnp.where(size > 0, first, _NO_RANGE)
    last = (size > 0) & (first + size == state.bump)
    freed = dataclasses.replace(
        state,
        bump=jnp.where(jnp.any(last), jnp.min(jnp.where(last, first, state.bump)), state.bump),
        n_slabs=state.n_slabs - int(whole),
        range_base=jnp.where(last, _NO_RANGE, first),
        range_size=jnp.where(last, 0, size),
    )
    return _where(ok, freed, state), ok


def free_tokens(state: HotState) -> Int[Array, ""]:
    """Free slots of the region: the free ranges and the slots above the bump pointer."""
    return jnp.sum(state.range_size) + state.limit - state.bump


def largest_range(state: HotState) -> Int[Array, ""]:
    """Tokens of the largest contiguous free range, alignment not considered."""
    return jnp.maximum(jnp.max(state.range_size), state.limit - state.bump)


def _align_up(slot, align):
    return (slot + align - 1) // align * align


def _sorted_ranges(state, sizes, *added):
    """Free ranges of ``state`` with new ``sizes``, plus the added ones, ascending, empties last."""
    base = jnp.concatenate([state.range_base, jnp.stack([jnp.asarray(b) for b, _ in added])])
    size = jnp.concatenate([sizes, jnp.stack([jnp.asarray(s) for _, s in added])])
    base = jnp.where(size > 0, base, _NO_RANGE)
    order = jnp.argsort(base)[: state.range_base.shape[0]]
    return base[order], jnp.maximum(size[order], 0)


def _where(ok, new, old):
    return jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)
