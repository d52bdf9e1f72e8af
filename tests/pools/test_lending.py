"""Lending: HOT capacity that moves to COLD and back."""

import jax
import jax.numpy as jnp
import pytest

from kvgrain_jax import PoolGeometry
from kvgrain_jax.pools import cold, hot, lending

LEND = jax.jit(lending.lend)
TAKE_BACK = jax.jit(lending.take_back)


def pools(page_size=4, slab=10):
    geometry = PoolGeometry(
        n_layers=1,
        n_kv_heads=1,
        head_dim=2,
        n_slots=64,
        n_hot=32,
        page_size=page_size,
        slab_align=16,
    )
    state = lending.init(geometry)
    if slab:
        state = lending.PoolState(hot.allocate(state.hot, slab)[0], state.cold, 32, page_size)
    return state


def free_pages(state):
    return set(state.cold.free[: int(state.cold.n_free)].tolist())


def test_whole_pages_above_the_bump_pointer_are_lent():
    state, lent = LEND(pools(), 100)
    assert int(lent) == 5  # slots [12, 32) behind a slab of 10 tokens
    assert int(state.hot.limit) == 12
    assert free_pages(state) == set(range(3, 16))


def test_no_more_is_lent_than_asked():
    state, lent = LEND(pools(), 2)
    assert int(lent) == 2
    assert int(state.hot.limit) == 24


def test_lent_slots_are_not_given_to_slabs():
    state, _ = LEND(pools(), 100)
    assert int(hot.allocate(state.hot, 1)[1]) == -1


def test_own_pages_are_taken_before_lent_ones():
    state, _ = LEND(pools(), 100)
    _, got, _ = cold.allocate(state.cold, jnp.ones(8, bool))
    assert sorted(got.tolist()) == list(range(8, 16))


def test_everything_lent_and_free_comes_back():
    state = pools()
    lent_state, _ = LEND(state, 3)
    back, taken = TAKE_BACK(lent_state)
    assert int(taken) == 3
    assert int(back.hot.limit) == 32
    assert free_pages(back) == free_pages(state)


def test_nothing_comes_back_while_one_lent_page_is_in_use():
    state, _ = LEND(pools(), 100)
    used, _, ok = cold.allocate(state.cold, jnp.ones(9, bool))
    assert ok
    state = lending.PoolState(state.hot, used, 32, 4)
    after, taken = TAKE_BACK(state)
    assert int(taken) == 0
    assert int(after.hot.limit) == int(state.hot.limit)
    assert free_pages(after) == free_pages(state)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_lending_and_taking_back_again_and_again_is_stable(page_size):
    state = pools(page_size, slab=0)
    want = free_pages(state)
    for n in (1, 2, 100, 1):
        state, lent = LEND(state, n)
        assert int(lending.lent_pages(state)) == int(lent)
        state, _ = TAKE_BACK(state)
        assert free_pages(state) == want
        assert int(state.hot.limit) == 32
