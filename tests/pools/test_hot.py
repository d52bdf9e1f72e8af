"""HOT pool: slabs against a plain-Python model of which slot is taken."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrain_jax.pools import hot

ALLOCATE = jax.jit(hot.allocate)
RELEASE = jax.jit(hot.release, static_argnames="whole")


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_slabs_follow_each_other_at_aligned_bases():
    state = hot.init(256, max_slabs=4, align=16)
    bases = []
    for n in (10, 20, 5):
        state, base = ALLOCATE(state, n)
        bases.append(int(base))
    assert bases == [0, 16, 48]


def test_length_is_not_padded_to_the_alignment():
    state, _ = ALLOCATE(hot.init(64, max_slabs=4, align=16), 10)
    assert int(hot.free_tokens(state)) == 54


def test_slab_that_does_not_fit_changes_nothing():
    state, _ = ALLOCATE(hot.init(64, max_slabs=4, align=16), 40)
    after, base = ALLOCATE(state, 17)
    assert int(base) == -1
    assert same(after, state)


def test_nonsense_lengths_change_nothing():
    state = hot.init(64, max_slabs=4, align=16)
    for n in (0, -1, 65, 2**31 - 1):
        after, base = ALLOCATE(state, n)
        assert int(base) == -1
        assert same(after, state)


def test_freed_range_is_reused_first_fit():
    state = hot.init(256, max_slabs=8, align=16)
    for n in (32, 32, 32):
        state, _ = ALLOCATE(state, n)
    state, ok = RELEASE(state, 32, 32)
    assert ok
    state, base = ALLOCATE(state, 30)
    assert int(base) == 32


def test_neighbours_merge_and_pull_the_bump_pointer_back():
    state = hot.init(256, max_slabs=8, align=16)
    for n in (32, 32, 32):
        state, _ = ALLOCATE(state, n)
    for base in (0, 64, 32):
        state, ok = RELEASE(state, base, 32)
        assert ok
    assert int(state.bump) == 0
    assert int(hot.largest_range(state)) == 256
    assert int(state.n_slabs) == 0


def test_slab_shrinks_from_its_end():
    state, base = ALLOCATE(hot.init(128, max_slabs=2, align=16), 40)
    state, ok = RELEASE(state, int(base) + 25, 15, whole=False)
    assert ok
    assert (int(state.bump), int(state.n_slabs)) == (25, 1)


def test_freeing_twice_or_what_was_never_taken_is_refused():
    state = hot.init(128, max_slabs=4, align=16)
    for n in (32, 32):
        state, _ = ALLOCATE(state, n)
    state, _ = RELEASE(state, 0, 32)
    for base, n in ((0, 32), (16, 8), (20, 20), (64, 4), (-4, 4), (32, 0), (40, 2**31 - 1)):
        after, ok = RELEASE(state, base, n)
        assert not ok, (base, n)
        assert same(after, state)


def test_slabs_are_limited_in_number():
    state = hot.init(64, max_slabs=2, align=1)
    for _ in range(2):
        state, base = ALLOCATE(state, 1)
        assert int(base) >= 0
    assert int(ALLOCATE(state, 1)[1]) == -1


ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 90), st.integers(0, 100)), max_size=40)


@settings(max_examples=40, deadline=None)
@given(ACTIONS, st.sampled_from([1, 4, 16]))
def test_slabs_never_overlap_and_first_fit_holds(actions, align):
    size, max_slabs = 200, 6
    state = hot.init(size, max_slabs=max_slabs, align=align)
    live: dict[int, int] = {}
    for is_allocation, n, pick in actions:
        taken = np.zeros(size, bool)
        for base, length in live.items():
            taken[base : base + length] = True
        if is_allocation:
            holes = [
                b
                for b in range(0, size, align)
                if n and b + n <= size and not taken[b : b + n].any()
            ]
            want = holes[0] if holes and len(live) < max_slabs else -1
            state, base = ALLOCATE(state, n)
            assert int(base) == want
            if want >= 0:
                live[want] = n
        elif live:
            base = sorted(live)[pick % len(live)]
            state, ok = RELEASE(state, base, live.pop(base))
            assert ok
        assert int(hot.free_tokens(state)) == size - sum(live.values())
        assert int(state.n_slabs) == len(live)
        assert int(state.bump) == max((b + n for b, n in live.items()), default=0)
