"""Head groups: a partition of the heads, and what its pages cost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvgrain_jax.budgets import HeadGroups, fill_pages, footprint, group_pages, make_groups
from kvgrain_jax.errors import ConfigError

BUDGETS = arrays.arrays(np.int64, (6, 4), elements=st.integers(1, 200))


@settings(deadline=None)
@given(BUDGETS, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
def test_global_groups_hold_neighbours_of_the_sorted_budgets(budgets, size):
    groups = make_groups(budgets, size)
    np.testing.assert_array_equal(groups.by_group(budgets).ravel(), np.sort(budgets.ravel()))
    assert groups.members.shape == (24 // size, size, 2)


@settings(deadline=None)
@given(BUDGETS, st.sampled_from([1, 2, 4]))
def test_layer_groups_hold_neighbours_of_one_layer(budgets, size):
    groups = make_groups(budgets, size, scope="layer")
    np.testing.assert_array_equal(groups.by_group(budgets).reshape(6, 4), np.sort(budgets, axis=1))
    layers = groups.members[..., 0]
    np.testing.assert_array_equal(layers, np.broadcast_to(layers[:, :1], layers.shape))


@settings(deadline=None)
@given(BUDGETS)
def test_every_head_finds_its_group_and_place(budgets):
    groups = make_groups(budgets, 4)
    for layer in range(6):
        for head in range(4):
            place = groups.members[groups.group_of[layer, head], groups.place_of[layer, head]]
            assert tuple(place) == (layer, head)


def test_equal_budgets_are_grouped_by_layer_then_head():
    groups = make_groups(np.full((2, 3), 7), 2)
    expected = [[[0, 0], [0, 1]], [[0, 2], [1, 0]], [[1, 1], [1, 2]]]
    np.testing.assert_array_equal(groups.members, expected)


@pytest.mark.parametrize(("size", "scope"), [(5, "global"), (3, "layer"), (8, "layer")])
def test_a_group_size_that_does_not_divide_the_heads_is_an_error(size, scope):
    with pytest.raises(ConfigError, match=f"G_h is {size}, which does not divide"):
        make_groups(np.ones((6, 4)), size, scope=scope)


@pytest.mark.parametrize("size", [0, 65])
def test_a_group_size_outside_1_to_64_is_an_error(size):
    with pytest.raises(ConfigError, match="1 to 64"):
        make_groups(np.ones((65, 2)), size)


def test_an_unknown_scope_is_an_error():
    with pytest.raises(ConfigError, match="'model'"):
        make_groups(np.ones((6, 4)), 2, scope="model")


@pytest.mark.parametrize(
    "members", [[[[0, 0]], [[0, 0]]], [[[0, 0]]], [[[0, 0]], [[0, 2]]], [[[0, 0]], [[-1, 1]]]]
)
def test_groups_that_are_no_partition_are_errors(members):
    with pytest.raises(ConfigError, match="exactly once"):
        HeadGroups(np.array(members, np.int32), 1, 2)


def test_a_group_pays_for_its_largest_budget_in_every_head():
    budgets = np.array([[16, 17], [40, 48]])
    groups = make_groups(budgets, 2)
    np.testing.assert_array_equal(group_pages(groups, budgets, 16), [2, 3])
    found = footprint(groups, budgets, page_size=16, head_dim=8, itemsize=2)
    vector = 2 * 8 * 2  # key and value
    assert found.pages == 5
    assert found.allocated_bytes == 5 * 16 * 2 * vector
    assert found.used_bytes == (16 + 17 + 40 + 48) * vector
    assert found.fragmentation == pytest.approx(1 - 121 / 160)


def test_unified_groups_all_pay_for_the_largest_budget_of_any_head():
    budgets = np.array([[9, 1], [2, 3]])
    layers = make_groups(budgets, 2, scope="layer")
    assert group_pages(layers, budgets, 4).tolist() == [3, 1]
    unified = dataclasses.replace(layers, unified=True)
    assert group_pages(unified, budgets, 4).tolist() == [3, 3]


def test_groups_of_one_waste_less_than_a_page_a_head():
    budgets = np.random.default_rng(0).integers(1, 1000, (5, 8))
    found = footprint(make_groups(budgets, 1), budgets, page_size=16, head_dim=1, itemsize=1)
    assert 0 <= found.allocated_bytes - found.used_bytes <= 2 * 15 * budgets.size


@settings(deadline=None)
@given(BUDGETS)
def test_finer_groups_never_waste_more(budgets):
    wasted = [
        footprint(
            make_groups(budgets, size), budgets, page_size=1, head_dim=1, itemsize=1
        ).fragmentation
        for size in (1, 2, 4, 8, 24)
    ]
    assert wasted[0] == 0
    assert wasted == sorted(wasted)


def test_a_page_size_of_zero_is_an_error():
    with pytest.raises(ConfigError, match="page_size is 0"):
        group_pages(make_groups(np.ones((1, 1)), 1), np.ones((1, 1), int), 0)


@settings(deadline=None)
@given(BUDGETS, st.sampled_from([1, 2, 4, 24]), st.sampled_from([1, 4, 16]), st.floats(0, 1))
def test_filled_pages_cost_exactly_what_was_asked(budgets, size, page_size, part):
    groups = make_groups(budgets, size)
    n, least = 200, 20
    fewest, most = (-(-tokens // page_size) * groups.n_groups for tokens in (least, n))
    pages = fewest + int(part * (most - fewest))
    filled = fill_pages(groups, budgets, n, page_size=page_size, pages=pages, least=least)
    assert group_pages(groups, filled, page_size).sum() == pages
    assert np.all((filled >= least) & (filled <= n))


def test_filled_pages_follow_the_budgets():
    budgets = np.array([[16, 64, 160]])
    filled = fill_pages(make_groups(budgets, 1), budgets, 640, page_size=16, pages=27)
    # One page each; the other 24 as 0 to 3 to 9, which is what the budgets are beyond it.
    np.testing.assert_array_equal(filled, [[16 * 1, 16 * 7, 16 * 19]])


def test_fewer_pages_than_the_protected_tokens_need_are_an_error():
    budgets = np.full((2, 2), 40)
    with pytest.raises(ConfigError, match="4 groups take 12 to 28 pages of 16"):
        fill_pages(make_groups(budgets, 1), budgets, 100, page_size=16, pages=11, least=36)
