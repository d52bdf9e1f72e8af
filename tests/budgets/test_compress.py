"""Choosing and placing tokens, against sorting and plain lists."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrain_jax.budgets import compress, pool
from kvgrain_jax.budgets.pool import HeadPoolGeometry

KEEP_BEST = jax.jit(compress.keep_best)
COMPACT = jax.jit(compress.compact)
ADD_TOKENS = jax.jit(compress.add_tokens)
WRITE = jax.jit(pool.write)
N_PLACES, N_NEW = 10, 6
INFINITY = float("inf")


@st.composite
def candidates(draw):
    """Scores with ties and infinities, positions in any order, some of them padding."""
    n = 12
    scores = draw(
        st.lists(
            st.sampled_from([-INFINITY, -2.5, -0.0, 0.0, 1e-30, 3.0, INFINITY]),
            min_size=n,
            max_size=n,
        )
    )
    positions = draw(st.permutations(range(n)))
    padding = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    budget = draw(st.integers(0, n))
    return scores, [-1 if pad else 3 * p for p, pad in zip(positions, padding, strict=True)], budget


@settings(deadline=None, max_examples=60)
@given(st.lists(candidates(), min_size=2, max_size=2))
def test_best_are_those_of_a_sort_by_score_then_position(heads):
    scores, positions, budgets = (list(x) for x in zip(*heads, strict=True))
    kept = KEEP_BEST(
        jnp.asarray(scores, jnp.float32), jnp.asarray(positions, jnp.int32), jnp.asarray(budgets)
    )
    for head in range(2):
        real = [i for i, p in enumerate(positions[head]) if p >= 0]
        real.sort(key=lambda i: (-scores[head][i], positions[head][i]))
        assert np.flatnonzero(kept[head]).tolist() == sorted(real[: budgets[head]])


def test_all_scores_equal_keeps_the_first_positions():
    kept = KEEP_BEST(jnp.zeros((1, 5)), jnp.asarray([[4, 0, 3, 1, 2]]), jnp.asarray([3]))
    assert np.flatnonzero(kept[0]).tolist() == [1, 3, 4]


def test_window_of_nothing_protects_nothing():
    scores, positions = jnp.zeros((1, 4)), jnp.asarray([[0, 1, 2, 3]], jnp.int32)
    free = compress.protected_scores(scores, positions, before=jnp.int32(0), after=jnp.int32(4))
    assert np.array_equal(free, scores)
    forced = compress.protected_scores(scores, positions, before=jnp.int32(1), after=jnp.int32(3))
    assert np.isinf(forced).tolist() == [[True, False, False, True]]


GEOMETRY = HeadPoolGeometry(group_size=1, head_dim=2, n_pages=24, page_size=1)


def pool_with(old: np.ndarray, places: np.ndarray):
    """A pool whose token at place ``i`` of a head is ``old[head, i]``."""
    flat = jnp.asarray(old, jnp.float32).reshape(-1)
    vectors = jnp.stack([flat, -flat], axis=1)
    return WRITE(
        pool.init(GEOMETRY),
        jnp.asarray(places, jnp.int32).reshape(-1),
        vectors,
        2 * vectors,
        flat,
        flat.astype(jnp.int32),
    )


def contents(kv, places: np.ndarray) -> np.ndarray:
    """The number at each place; key, value, score and position must agree on it."""
    found = np.asarray(kv.positions)[places, 0]
    np.testing.assert_array_equal(np.asarray(kv.k)[places, 0, 1], -found)
    np.testing.assert_array_equal(np.asarray(kv.v)[places, 0, 0], 2 * found)
    np.testing.assert_array_equal(np.asarray(kv.scores)[places, 0], found)
    return found


masks = st.lists(st.booleans(), min_size=2 * N_PLACES, max_size=2 * N_PLACES)


@settings(deadline=None, max_examples=30)
@given(masks, st.lists(st.booleans(), min_size=2 * N_NEW, max_size=2 * N_NEW), st.booleans())
def test_kept_tokens_fill_the_first_places_and_survivors_stay(old_mask, new_mask, shrinks):
    places = np.random.default_rng(0).permutation(24)[:20].reshape(2, N_PLACES)
    old = 10 + np.arange(20).reshape(2, N_PLACES)
    kept_old = np.asarray(old_mask).reshape(2, N_PLACES)
    kept_new = np.asarray(new_mask).reshape(2, N_NEW)
    for head in range(2):  # no more than there is room for
        room = N_PLACES - kept_old[head].sum()
        kept_new[head, np.flatnonzero(kept_new[head])[room:]] = False
    kv, taken = pool_with(old, places), jnp.asarray(kept_old)
    if shrinks:
        kv, taken = COMPACT(kv, jnp.asarray(places, jnp.int32), taken)
    new = 50 + np.arange(N_NEW)
    vectors = jnp.asarray(np.stack([new, -new], axis=1), jnp.float32)[:, None, :]
    vectors = jnp.broadcast_to(vectors, (N_NEW, 2, 2))
    kv = ADD_TOKENS(
        kv,
        jnp.asarray(places, jnp.int32),
        taken,
        jnp.asarray(kept_new),
        vectors,
        2 * vectors,
        jnp.broadcast_to(jnp.asarray(new, jnp.float32)[None, :], (2, N_NEW)),
        jnp.asarray(new, jnp.int32),
    )
    after = contents(kv, places)
    for head in range(2):
        expected = [*old[head][kept_old[head]], *new[kept_new[head]]]
        if shrinks:
            assert sorted(after[head][: len(expected)]) == sorted(expected)
        else:
            stayed = np.flatnonzero(kept_old[head])
            assert np.array_equal(after[head][stayed], old[head][stayed])
            free = np.flatnonzero(~kept_old[head])[: kept_new[head].sum()]
            assert after[head][free].tolist() == new[kept_new[head]].tolist()
