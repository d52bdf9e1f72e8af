"""COLD pool: pages against a plain-Python set of free ones."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrain_jax.pools import cold

ALLOCATE = jax.jit(cold.allocate)
ALLOCATE_RUN = jax.jit(cold.allocate_run)
RELEASE = jax.jit(cold.release)


def need(*flags):
    return jnp.asarray(flags, bool)


def pages(*ids):
    return jnp.asarray(ids, jnp.int32)


def test_only_rows_in_need_get_a_page():
    state, got, ok = ALLOCATE(cold.init(8, 2), need(True, False, True))
    assert ok
    assert got.tolist() == [2, -1, 3]
    assert int(state.n_free) == 4


def test_too_few_pages_change_nothing():
    state = cold.init(4, 2)
    after, got, ok = ALLOCATE(state, need(True, True, True))
    assert not ok
    assert got.tolist() == [-1, -1, -1]
    assert int(after.n_free) == 2
    assert np.array_equal(after.free, state.free)


def test_freed_pages_come_back():
    state, got, _ = ALLOCATE(cold.init(4, 0), need(True, True, True, True))
    state, ok = RELEASE(state, got)
    assert ok
    assert sorted(state.free[: int(state.n_free)].tolist()) == [0, 1, 2, 3]


def test_freeing_a_free_page_is_refused():
    state, got, _ = ALLOCATE(cold.init(4, 0), need(True, True))
    state, _ = RELEASE(state, got)
    after, ok = RELEASE(state, got)
    assert not ok
    assert int(after.n_free) == int(state.n_free)


def test_freeing_a_page_twice_in_one_call_is_refused():
    state, got, _ = ALLOCATE(cold.init(4, 0), need(True, True))
    after, ok = RELEASE(state, pages(int(got[0]), int(got[0])))
    assert not ok
    assert int(after.n_free) == 2


def test_pages_that_do_not_exist_are_refused():
    state, _, _ = ALLOCATE(cold.init(4, 0), need(True, True))
    for bad in (4, 1000, -2):
        after, ok = RELEASE(state, pages(bad, -1))
        assert not ok
        assert int(after.n_free) == 2


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 11)), st.permutations(range(12)), st.integers(0, 13))
def test_a_run_is_the_highest_free_range_and_the_other_pages_stay_free(taken, order, n):
    state, _, _ = ALLOCATE(cold.init(12, 0), need(*[True] * 12))
    back = [page for page in order if page not in taken]
    state, _ = RELEASE(state, pages(*(back + [-1] * (12 - len(back)))))
    runs = [first for first in range(13 - n) if not taken & set(range(first, first + n))]
    expected = max(runs, default=-1) if n else -1
    after, first = ALLOCATE_RUN(state, n)
    assert int(first) == expected
    run = range(expected, expected + n) if expected >= 0 else ()
    left = after.free[: int(after.n_free)].tolist()
    assert left == [page for page in back if page not in run]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.booleans(), min_size=5, max_size=5)), max_size=25)
)
def test_pages_are_partitioned_into_free_and_held(actions):
    state = cold.init(12, 3)
    held: list[int] = []
    for is_allocation, flags in actions:
        if is_allocation:
            state, got, ok = ALLOCATE(state, need(*flags))
            assert bool(ok) == (sum(flags) <= 9 - len(held))
            new = [page for page in got.tolist() if page != -1]
            assert len(new) == (sum(flags) if ok else 0)
            held += new
        else:
            chosen = [page for page, flag in zip(held, flags, strict=False) if flag]
            state, ok = RELEASE(state, pages(*(chosen + [-1] * (5 - len(chosen)))))
            assert ok
            held = [page for page in held if page not in chosen]
        free = state.free[: int(state.n_free)].tolist()
        assert sorted(free + held) == list(range(3, 12))
