"""Compression of one layer: enter a head's survivors and a chunk's tokens, leave its best in place.

A head's tokens lie in no particular order, as every key carries its position. So a survivor that
stays is not moved: the tokens of the chunk that are kept go to the places of those that are evicted
and behind the last. After every chunk each head holds exactly as many tokens as the host planned.

The best ``b`` of a stream are found exactly if ``b`` places are there from the start: what is
among the best at the end was among them at every moment. That is why a prompt may use its whole
budget from the first chunk on, and why the choice then does not depend on the chunks, as far as
the scores do not. (Keys and values of deeper layers do depend on them: a token attends to all of
its own chunk, but only to the survivors of earlier ones.)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvgrain_jax.budgets import pool
from kvgrain_jax.budgets.pool import HeadKV

_RADIX_BITS = 4


def keep_best(
    scores: Float[Array, "heads M"],
    positions: Int[Array, "heads M"],
    budgets: Int[Array, "heads"],
) -> Bool[Array, "heads M"]:
    """Which candidates each head keeps: the best by score, of equal ones the earliest position.

    Args:
      scores: float32; ``+inf`` is kept first. Candidates are in any order.
      positions: distinct within a head where valid; -1 for padding, which is never kept.
      budgets: candidates to keep; all where there are fewer.
    """
    valid = positions >= 0
    keys = jnp.where(valid, _sortable(scores), 0)
    worst = _kth_largest(keys, budgets)[:, None]
    better = valid & (keys > worst)
    tied = valid & (keys == worst)
    room = budgets - jnp.sum(better, axis=1, dtype=jnp.int32)
    earliness = jnp.where(tied, ~positions.astype(jnp.uint32), 0)
    last = _kth_largest(earliness, room)[:, None]
    return better | (tied & (earliness >= last) & (room > 0)[:, None])


def protected_scores(
    scores: Float[Array, "heads M"],
    positions: Int[Array, "heads M"],
    *,
    before: Int[Array, ""],
    after: Int[Array, ""],
) -> Float[Array, "heads M"]:
    """Scores with ``+inf`` at positions below ``before`` and from ``after`` on: kept in any case."""
    forced = (positions < before) | (positions >= after)
    return jnp.where(forced, jnp.inf, scores)


def compact(
    kv: HeadKV, places: Int[Array, "K S"], kept: Bool[Array, "K S"]
) -> tuple[HeadKV, Bool[Array, "K S"]]:
    """Move the last tokens that stay into the places of tokens that do not, so that no gap is left.

    Args:
      kv: the pool.
      places: single-head row of each place of each head.
      kept: places whose token stays.

    Returns:
      ``(kv, taken)``: the places that hold a token now, for each head its first ones.
    """
    n_kept = jnp.sum(kept, axis=1, dtype=jnp.int32)[:, None]
    taken = jnp.arange(places.shape[1], dtype=jnp.int32)[None, :] < n_kept
    old = places.reshape(-1)
    moved = (*pool.read_vectors(kv, old), *pool.read_notes(kv, old))
    rows = _rows_to_fill(kv, places, taken & ~kept, kept & ~taken, places.shape[1])
    return pool.write(kv, rows, *moved), taken


def add_tokens(
    kv: HeadKV,
    places: Int[Array, "K S"],
    taken: Bool[Array, "K S"],
    kept: Bool[Array, "K C"],
    k: Float[Array, "C K D"],
    v: Float[Array, "C K D"],
    scores: Float[Array, "K C"],
    positions: Int[Array, "C"],
) -> HeadKV:
    """Put the tokens of a chunk that stay into the first places that are not taken.

    Args:
      kv: the pool.
      places: single-head row of each place of each head.
      taken: places that hold a token that stays.
      kept: tokens of the chunk that stay.
      k: keys of the chunk.
      v: values of the chunk.
      scores: scores of the chunk's tokens.
      positions: positions of the chunk's tokens.
    """
    rows = _rows_to_fill(kv, places, ~taken, kept, min(places.shape[1], kept.shape[1]))

    def by_head(x):
        return x.swapaxes(0, 1).reshape(rows.size, -1)

    at = jnp.broadcast_to(positions[None, :], kept.shape).reshape(-1)
    return pool.write(kv, rows, by_head(k), by_head(v), scores.reshape(-1), at)


def _rows_to_fill(
    kv: HeadKV,
    places: Int[Array, "K S"],
    free: Bool[Array, "K S"],
    moves: Bool[Array, "K M"],
    most: int,
) -> Int[Array, "moves"]:
    """Row of the next free place for each token that moves; a row behind the pool for the others.

    ``most``: tokens of a head that move, at most.
    """
    n_places = places.shape[1]
    found = jax.vmap(lambda mask: jnp.nonzero(mask, size=most, fill_value=n_places)[0])(free)
    rank = jnp.cumsum(moves, axis=1, dtype=jnp.int32) - 1
    place = jnp.take_along_axis(found.astype(jnp.int32), rank, axis=1, mode="clip")
    row = jnp.take_along_axis(places, place, axis=1, mode="clip")
    return jnp.where(moves & (place < n_places), row, kv.scores.size).reshape(-1)


def _sortable(scores: Float[Array, "heads M"]) -> UInt32[Array, "heads M"]:
    """Unsigned integers in the order of float32 scores, all above 0; -0 and 0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _kth_largest(keys: UInt32[Array, "heads M"], k: Int[Array, "heads"]) -> UInt32[Array, "heads"]:
    """The ``k``-th largest key of each head, ``k >= 1``; 0 where there are fewer than ``k`` above 0.

    Digit by digit from the top, so the keys are read a fixed number of times and never sorted.
    """
    digits = jnp.arange(1 << _RADIX_BITS, dtype=jnp.uint32)

    def next_digit(i, found):
        shift = jnp.uint32(32 - _RADIX_BITS) - i.astype(jnp.uint32) * _RADIX_BITS
        bounds = found[:, None] | (digits << shift)[None, :]
        counts = jnp.sum(keys[:, None, :] >= bounds[:, :, None], axis=2, dtype=jnp.int32)
        reached = jnp.sum(counts >= k[:, None], axis=1) - 1  # counts fall with the digit
        return found | digits[jnp.maximum(reached, 0)] << shift

    return lax.fori_loop(0, 32 // _RADIX_BITS, next_digit, jnp.zeros(keys.shape[0], jnp.uint32))
