"""Split tables: Algorithm 1 by hand, its caps, and the balance it buys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvgrain_jax.budgets import SplitTable, even_partition, partition
from kvgrain_jax.errors import ConfigError

LENGTHS = arrays.arrays(np.int64, (3, 8), elements=st.integers(0, 5000))


def test_splits_follow_algorithm_1():
    # tau = ceil(1100 / 8) = 138: ceil(800 / 138) = 6, ceil(100 / 138) = 1, ceil(200 / 138) = 2.
    table = partition(np.array([[800, 100, 200]]), n_blocks=8)
    np.testing.assert_array_equal(table.splits, [[6, 1, 2]])


def test_each_layer_is_divided_on_its_own():
    one = partition(np.array([[800, 100, 200]]), n_blocks=8)
    two = partition(np.array([[800, 100, 200], [10, 10, 10]]), n_blocks=8)
    np.testing.assert_array_equal(two.splits[0], one.splits[0])


def test_a_head_has_no_more_splits_than_pages():
    table = partition(np.array([[40, 1]]), n_blocks=100, page_size=16)
    np.testing.assert_array_equal(table.splits, [[3, 1]])


def test_an_empty_layer_gets_one_split_a_head():
    np.testing.assert_array_equal(partition(np.zeros((1, 3), int), n_blocks=8).splits, [[1, 1, 1]])


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 300), st.sampled_from([1, 16]))
def test_a_layer_launches_at_most_its_blocks_and_one_for_each_head(lengths, n_blocks, page_size):
    table = partition(lengths, n_blocks=n_blocks, page_size=page_size)
    assert np.all(table.blocks() <= n_blocks + 8)
    assert np.all(table.splits >= 1)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 300))
def test_no_block_is_longer_than_the_share_of_one_block(lengths, n_blocks):
    table = partition(lengths, n_blocks=n_blocks)
    share = np.maximum(1, -(-lengths.sum(axis=1) // n_blocks))
    assert np.all(table.block_tokens(lengths) <= share[:, None])


def test_block_tokens_are_whole_pages_of_the_largest_split():
    table = SplitTable(np.array([[3]], np.int32), 16)
    # 100 tokens are 7 pages, 3 of them in the largest split.
    np.testing.assert_array_equal(table.block_tokens(np.array([[100]])), [[48]])


def test_equal_heads_are_balanced():
    lengths = np.full((2, 4), 1024)
    assert partition(lengths, n_blocks=32).imbalance(lengths) == pytest.approx(1.0)


def test_one_long_head_is_balanced_by_the_table_and_not_by_even_splits():
    lengths = np.array([[8192, 256, 256, 256]])
    table, even = (f(lengths, n_blocks=64, page_size=16) for f in (partition, even_partition))
    np.testing.assert_array_equal(even.splits, [[16, 16, 16, 16]])
    # The longest of 64 even blocks has 512 tokens, the mean 140.
    assert even.imbalance(lengths) == pytest.approx(512 / 140)
    assert table.imbalance(lengths) < 1.2


@pytest.mark.parametrize("wrong", [{"n_blocks": 0}, {"n_blocks": 8, "page_size": 0}])
def test_sizes_that_are_not_positive_are_errors(wrong):
    for rule in (partition, even_partition):
        with pytest.raises(ConfigError, match="must be positive"):
            rule(np.ones((1, 1), int), **wrong)


def test_negative_lengths_are_errors():
    with pytest.raises(ConfigError, match="-1 tokens"):
        partition(np.array([[-1]]), n_blocks=8)


def test_a_table_without_splits_is_an_error():
    with pytest.raises(ConfigError, match="no split"):
        SplitTable(np.array([[1, 0]], np.int32), 1)
