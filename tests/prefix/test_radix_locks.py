"""The prefix index: what it pins, gives up, and moves to HOT."""

import numpy as np
import pytest
from radix_pieces import cold, hot, places, slots

from kvgrain_jax.errors import ConfigError, KVGrainError
from kvgrain_jax.prefix.node import Hot, Size
from kvgrain_jax.prefix.radix import RadixIndex

# -- lock, extend, unlock --------------------------------------------------------------------------


def test_a_lock_pins_its_own_node_and_all_above(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    index.insert([1, 2, 3], [cold(2, [12])])
    handle = index.lock(index.match([1, 2, 3]))
    assert handle.end == 3
    assert [node.lock_count for node in index.path(handle)] == [1, 1]
    assert index.evict("cold", 3) == []


def test_a_partial_match_does_not_pin_the_rest_of_the_node(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    index.lock(index.match([1, 2, 9]))
    assert index.size().locked_tokens == 2
    assert places(index.evict("cold", 4)) == [(2, 4, [12, 13])]


def test_locking_an_empty_match_pins_nothing(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    handle = index.lock(index.match([7]))
    assert handle is index.root
    assert len(index.evict("cold", 2)) == 1
    index.unlock(handle)


def test_a_match_survives_a_split_of_its_node(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    short, long = index.match([1, 9]), index.match([1, 2, 3, 9])
    index.lock(index.match([1, 2, 9]))
    assert slots(index, index.lock(short)) == [10]
    assert slots(index, index.lock(long)) == [10, 11, 12]


def test_a_match_of_an_evicted_node_cannot_be_locked(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    match = index.match([1, 2])
    index.evict("cold", 1)
    with pytest.raises(KVGrainError, match="match again"):
        index.lock(match)


def test_a_handle_survives_a_split_and_releases_both_halves(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    handle = index.lock(index.match([1, 2, 3, 4]))
    index.insert([1, 2, 9], [cold(2, [20])])
    assert slots(index, handle) == [10, 11, 12, 13]
    assert [node.lock_count for node in index.path(handle)] == [1, 1]
    index.unlock(handle)
    assert index.size().locked_tokens == 0
    assert index.size().evictable_cold_pages == 5


def test_a_node_is_locked_until_its_last_lock_is_given_back(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    first, second = index.lock(index.match([1, 2])), index.lock(index.match([1, 2]))
    index.unlock(first)
    assert index.evict("cold", 2) == []
    index.unlock(second)
    assert len(index.evict("cold", 2)) == 1


def test_a_lock_given_back_twice_is_refused(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    handle = index.lock(index.match([1, 2]))
    index.unlock(handle)
    with pytest.raises(KVGrainError, match="given back"):
        index.unlock(handle)


def test_a_node_that_is_locked_only_from_below_is_no_handle(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    index.insert([1, 2, 3], [cold(2, [12])])
    handle = index.lock(index.match([1, 2, 3]))
    with pytest.raises(KVGrainError, match="No lock is held"):
        index.unlock(index.path(handle)[0])


def test_a_handle_of_another_index_is_refused(index):
    other = RadixIndex()
    other.insert([1], [cold(0, [1])])
    handle = other.lock(other.match([1]))
    with pytest.raises(KVGrainError, match="does not hold"):
        index.unlock(handle)


def test_an_extended_lock_pins_the_new_tokens_and_moves_the_handle(index):
    handle = index.lock(index.match([1, 2, 3]))
    inserted = index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    new = index.extend(handle, inserted.node)
    assert index.size().locked_tokens == 3
    with pytest.raises(KVGrainError, match="extended"):
        index.unlock(handle)
    index.unlock(new)
    assert index.size().locked_tokens == 0


def test_a_lock_is_extended_only_downwards(index):
    index.insert([1], [cold(0, [10])])
    other = index.insert([2], [cold(0, [20])]).node
    handle = index.lock(index.match([1]))
    with pytest.raises(KVGrainError, match="not below"):
        index.extend(handle, other)
    assert index.size().locked_tokens == 1


# -- evict -----------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first(index):
    for token in (1, 2, 3):
        index.insert([token], [cold(0, [10 * token])])
    index.unlock(index.lock(index.match([1])))
    assert places(index.evict("cold", 2)) == [(0, 1, [20]), (0, 1, [30])]


def test_a_prefix_counts_as_used_until_its_lock_is_given_back(index):
    index.insert([1], [cold(0, [10])])
    index.insert([2], [cold(0, [20])])
    first = index.lock(index.match([1]))
    index.unlock(index.lock(index.match([2])))
    index.unlock(first)
    assert places(index.evict("cold", 1)) == [(0, 1, [20])]


def test_a_parent_can_go_when_its_last_child_has_gone(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    index.insert([1, 2, 3], [cold(2, [12])])
    index.insert([1, 2, 4], [cold(2, [13])])
    assert places(index.evict("cold", 4)) == [(2, 3, [12]), (2, 3, [13]), (0, 2, [10, 11])]
    assert index.size() == Size()


def test_eviction_stops_as_soon_as_enough_is_free(index):
    for token in (1, 2, 3):
        index.insert([token, token], [cold(0, [10 * token, 10 * token + 1])])
    assert places(index.evict("cold", 3)) == [(0, 2, [10, 11]), (0, 2, [20, 21])]
    assert index.evict("cold", 0) == []


def test_pages_and_not_tokens_of_cold_are_counted(paged):
    for token in (1, 2, 3):
        paged.insert(np.full(8, token), [cold(0, [10 * token, 10 * token + 1], 4)])
    assert len(paged.evict("cold", 3)) == 2


def test_evicting_more_than_there_is_gives_what_there_is(index):
    index.insert([1], [cold(0, [10])])
    index.insert([2], [cold(0, [20])])
    index.lock(index.match([2]))
    assert places(index.evict("cold", 100)) == [(0, 1, [10])]


def test_an_evicted_prefix_is_not_found(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    index.evict("cold", 1)
    assert index.match([1, 2]).length == 0


def test_a_hot_chain_goes_from_its_end(index):
    index.insert([1, 2], [hot(0, 2, 0)])
    index.insert([1, 2, 3], [hot(2, 3, 2)])
    index.insert([1, 2, 4], [hot(2, 3, 8)])
    assert places(index.evict_one("hot")) == [(2, 3, 2)]
    assert places(index.evict_one("hot")) == [(2, 3, 8)]
    assert places(index.evict_one("hot")) == [(0, 2, 0)]
    assert index.evict_one("hot") == []


def test_a_hot_node_takes_the_cold_nodes_below_with_it(index):
    index.insert([1, 2], [hot(0, 2, 0)])
    index.insert([1, 2, 3], [cold(2, [12])])
    index.insert([1, 2, 3, 4], [cold(3, [13])])
    index.insert([1, 2, 5], [cold(2, [14])])
    freed = index.evict("hot", 1)
    assert places(freed)[0] == (0, 2, 0)
    assert sorted(places(freed)[1:]) == [(2, 3, [12]), (2, 3, [14]), (3, 4, [13])]
    assert index.size() == Size()
    assert index.evict("cold", 1) == []


def test_a_hot_node_with_a_locked_cold_node_below_stays(index):
    index.insert([1], [hot(0, 1, 0)])
    index.insert([1, 2], [cold(1, [12])])
    index.lock(index.match([1, 2]))
    assert index.evict("hot", 1) == []


def test_evicting_hot_counts_hot_tokens_only(index):
    index.insert([1], [hot(0, 1, 0)])
    index.insert([1, 2, 3], [cold(1, [12, 13])])
    index.insert([5], [hot(0, 1, 8)])
    assert len(index.evict("hot", 2)) == 3


def test_an_unknown_pool_is_refused(index):
    with pytest.raises(ConfigError, match="no pool 'warm'"):
        index.evict_one("warm")


def test_using_prefixes_over_and_over_does_not_pile_up_bookkeeping(index):
    index.insert([1], [cold(0, [10])])
    for _ in range(100):
        index.unlock(index.lock(index.match([1])))
    assert len(index._tree.evictable["cold"]) == 1


def test_cold_nodes_that_left_with_hot_ones_are_forgotten(index):
    for base in range(100):
        index.insert([1], [hot(0, 1, base)])
        index.insert([1, 2], [cold(1, [200])])
        index.evict_one("hot")
    assert len(index._tree.evictable["cold"]) <= 2


# -- promote, ranges, drop_all ---------------------------------------------------------------------


def test_a_promoted_node_is_hot_and_gives_its_pages_back(paged):
    node = paged.insert(np.arange(8), [cold(0, [7, 3], 4)]).node
    assert paged.promote(node, 16).tolist() == [7, 3]
    assert node.tag == Hot(16)
    assert paged.size().hot_tokens == 8
    assert paged.size().cold_pages == 0
    assert places(paged.evict("hot", 1)) == [(0, 8, 16)]


def test_a_locked_node_can_be_promoted_and_stays_locked(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    handle = index.lock(index.match([1, 2]))
    index.promote(handle, 0)
    assert slots(index, handle) == [0, 1]
    assert index.evict("hot", 1) == []
    index.unlock(handle)
    assert len(index.evict("hot", 1)) == 1


def test_a_chain_is_promoted_from_the_top(index):
    index.insert([1], [cold(0, [10])])
    lower = index.insert([1, 2], [cold(1, [11])]).node
    with pytest.raises(KVGrainError, match="promote that first"):
        index.promote(lower, 1)
    for base, node in enumerate(index.path(lower)):
        index.promote(node, base)
    assert slots(index, lower) == [0, 1]


def test_a_hot_node_cannot_be_promoted(index):
    node = index.insert([1], [hot(0, 1, 0)]).node
    for refused in (node, index.root):
        with pytest.raises(KVGrainError, match="in HOT already"):
            index.promote(refused, 8)


def test_a_base_between_pages_is_refused(paged):
    node = paged.insert(np.arange(4), [cold(0, [7], 4)]).node
    with pytest.raises(KVGrainError, match="base is 6"):
        paged.promote(node, 6)
    assert not node.is_hot


def test_hot_ranges_say_what_evictions_can_free(index):
    index.insert([1, 2], [hot(0, 2, 0)])
    index.insert([1, 2, 3], [hot(2, 3, 2)])
    index.insert([1, 2, 4], [cold(2, [50])])
    index.insert([9], [hot(0, 1, 8)])
    index.insert([7], [cold(0, [60])])
    index.lock(index.match([1, 2, 4]))
    assert sorted(index.hot_ranges()) == [(0, 2, False), (2, 1, True), (8, 1, True)]


def test_dropping_all_gives_every_slot_back_once_and_forgets_every_prefix(index):
    index.insert([1, 2], [hot(0, 2, 0)])
    index.insert([1, 2, 3], [cold(2, [50])])
    index.insert([7], [cold(0, [60])])
    freed = index.drop_all()
    assert sorted(page for piece in freed for page in piece.pages(1)) == [0, 1, 50, 60]
    assert index.match([1, 2, 3]).length == 0
    assert index.size() == Size()
    assert index.evict("cold", 1) == index.evict("hot", 1) == []


def test_nothing_is_dropped_while_a_prefix_is_in_use(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    index.lock(index.match([1]))
    with pytest.raises(KVGrainError, match="1 locks are held"):
        index.drop_all()
    assert index.match([1, 2]).length == 2
