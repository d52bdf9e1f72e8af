"""The prefix index counts what it holds, and finds damage to itself."""

import numpy as np
import pytest
from radix_pieces import cold, hot

from kvgrain_jax.errors import ConfigError, PoolCorrupted
from kvgrain_jax.prefix.node import Cold, Size
from kvgrain_jax.prefix.radix import RadixIndex


def test_size_counts_both_pools_locks_and_prefixes(paged):
    paged.insert(np.arange(16), [hot(0, 8, 0), cold(8, [10, 11], 4)], declared=4)
    paged.lock(paged.match(np.arange(12)))
    assert paged.size() == Size(
        nodes=4,
        hot_tokens=8,
        cold_pages=2,
        locked_tokens=12,
        prefix_tokens=12,
        evictable_hot_tokens=0,
        evictable_cold_pages=1,
    )


def test_integrity_lists_the_slots_that_the_index_owns(paged):
    paged.insert(np.arange(16), [hot(0, 4, 32), hot(4, 8, 4), cold(8, [11, 10], 4)])
    owned = paged.check_integrity()
    assert owned.hot.tolist() == [[4, 4], [32, 4]]
    assert owned.cold.tolist() == [10, 11]


def test_a_page_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="page size is 0"):
        RadixIndex(0)


def _own_twice(index, upper, lower):
    index.insert([9], [cold(0, [11])])


def _stale_key(index, upper, lower):
    upper.children[b"else"] = upper.children.pop(lower.tokens[:1].tobytes())


def _foreign_parent(index, upper, lower):
    lower.parent = index.root


def _gap(index, upper, lower):
    lower.start += 1


def _lost_page(index, upper, lower):
    lower.tag = Cold(np.array([11]))


def _lost_lock(index, upper, lower):
    lower.lock_count = 0


def _invented_handle(index, upper, lower):
    upper.handles = 1


def _hot_below_cold(index, upper, lower):
    upper.tag = Cold(np.array([50]))
    index.root.hot_children = 0


def _miscounted_children(index, upper, lower):
    upper.hot_children = 1


def _miscounted_tokens(index, upper, lower):
    lower.hits = 5


def _declared_alone(index, upper, lower):
    lower.declared = True


def _used_out_of_order(index, upper, lower):
    lower.last_access = upper.last_access + 1


def _unlisted(index, upper, lower):
    index._tree.evictable["cold"].pop()


def _same_id(index, upper, lower):
    lower.id = upper.id


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_own_twice, "Page 11 is owned by node"),
        (_stale_key, "not below node .* under its first page"),
        (_foreign_parent, "hangs below node"),
        (_gap, "begins at 2; its parent ends at 1"),
        (_lost_page, "2 tokens in 1 pages"),
        (_lost_lock, "locked 1 times, but has 0 handles and 0 locks below"),
        (_invented_handle, "has 1 handles and 1 locks below"),
        (_hot_below_cold, "which is COLD"),
        (_miscounted_children, "counts 1 HOT children; it has 0"),
        (_miscounted_tokens, "its nodes add up to"),
        (_declared_alone, "is a declared prefix, but"),
        (_used_out_of_order, "was used after"),
        (_unlisted, "could be evicted, but is not listed"),
        (_same_id, "same id"),
    ],
)
def test_damage_is_found_and_named(damage, message):
    index = RadixIndex()
    handle = index.lock(index.match([1]))
    lower = index.insert([1, 2, 3], [hot(0, 1, 0), cold(1, [11, 12])]).node
    index.extend(handle, lower)
    index.insert([1, 5], [hot(1, 2, 4)] if damage is _hot_below_cold else [cold(1, [20])])
    upper = index.path(lower)[0]
    index.check_integrity()
    damage(index, upper, lower)
    with pytest.raises(PoolCorrupted, match=message):
        index.check_integrity()
