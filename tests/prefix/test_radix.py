"""The prefix index: what it finds, owns, and knows to be shared."""

import numpy as np
import pytest
from radix_pieces import cold, hot, places, slots

from kvgrain_jax.errors import KVGrainError, RequestError
from kvgrain_jax.prefix.node import Cold, Hot, Piece, Size

# -- match -----------------------------------------------------------------------------------------


def test_nothing_matches_in_an_empty_index(index):
    match = index.match([1, 2, 3])
    assert match.node is index.root
    assert match.length == 0


def test_an_empty_prompt_matches_nothing(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    assert index.match([]).length == 0


def test_the_longest_cached_prefix_is_found(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    index.insert([1, 2, 3, 4, 5], [cold(3, [13, 14])])
    match = index.match([1, 2, 3, 4, 9])
    assert match.length == 4
    assert match.node_tokens == 1
    assert match.node.tokens.tolist() == [4, 5]


def test_a_prompt_that_is_cached_entirely_leaves_its_last_token_to_compute(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    assert index.match([1, 2, 3, 4], limit=3).length == 3


def test_the_limit_is_cut_to_whole_pages(paged):
    paged.insert(np.arange(8), [cold(0, [5, 6], 4)])
    assert paged.match(np.arange(8), limit=7).length == 4


def test_a_prompt_shorter_than_a_page_matches_nothing(paged):
    paged.insert(np.arange(4), [cold(0, [5], 4)])
    assert paged.match(np.arange(3)).length == 0


def test_pages_that_differ_in_their_last_token_do_not_match(paged):
    paged.insert([1, 1, 1, 1, 2, 2, 2, 2], [cold(0, [5, 6], 4)])
    assert paged.match([1, 1, 1, 1, 2, 2, 2, 3]).length == 4
    assert paged.match([1, 1, 1, 2, 2, 2, 2, 2]).length == 0


def test_matching_changes_nothing(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    node = index.match([1, 2, 3]).node
    before = (node.hits, node.last_access, node.lock_count, node.end, index.size())
    index.match([1, 2])
    assert (node.hits, node.last_access, node.lock_count, node.end, index.size()) == before


def test_a_negative_limit_is_refused(index):
    with pytest.raises(RequestError, match="limit is -1"):
        index.match([1], limit=-1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, -1]), "run from -1"),
        (np.array([2**31]), "to 2147483648"),
        (np.array([1.0, 2.0]), "float64"),
        (np.array([True]), "bool"),
        (np.zeros((2, 2), np.int32), r"shape \(2, 2\)"),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused(index, tokens, message):
    with pytest.raises(RequestError, match=message):
        index.match(tokens)
    with pytest.raises(RequestError, match=message):
        index.insert(tokens, [])


# -- insert ----------------------------------------------------------------------------------------


def test_inserted_tokens_are_found_at_their_slots(paged):
    inserted = paged.insert(np.arange(12), [hot(0, 8, 16), cold(8, [9], 4)])
    assert not inserted.duplicates
    assert not inserted.rejected
    assert slots(paged, inserted.node) == [*range(16, 24), 36, 37, 38, 39]


def test_the_index_keeps_its_own_tokens(index):
    tokens = np.array([1, 2, 3], np.int32)
    index.insert(tokens, [cold(0, [10, 11, 12])])
    tokens[:] = 7
    assert index.match([1, 2, 3]).length == 3


def test_sequences_that_part_share_a_node(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    index.insert([1, 2, 8, 9], [cold(2, [20, 21])])
    first, second = index.match([1, 2, 3, 4]).node, index.match([1, 2, 8, 9]).node
    assert slots(index, first) == [10, 11, 12, 13]
    assert slots(index, second) == [10, 11, 20, 21]
    assert index.path(first)[0] is index.path(second)[0]


def test_a_split_hot_node_stays_in_its_slab(paged):
    paged.insert(np.arange(12), [hot(0, 12, 32)])
    paged.insert([0, 1, 2, 3, 9, 9, 9, 9], [cold(4, [2], 4)])
    path = paged.path(paged.match(np.arange(12)).node)
    assert [node.tag for node in path] == [Hot(32), Hot(36)]
    assert [node.length for node in path] == [4, 8]


def test_child_keys_hold_after_a_split_in_the_middle(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    index.insert([1, 2, 3, 4, 5], [cold(4, [14])])
    index.insert([1, 2, 7], [cold(2, [20])])
    index.insert([1, 8], [cold(1, [30])])
    for tokens, want in [
        ([1, 2, 3, 4, 5], [10, 11, 12, 13, 14]),
        ([1, 2, 7], [10, 11, 20]),
        ([1, 8], [10, 30]),
    ]:
        match = index.match(tokens)
        assert match.length == len(tokens)
        assert slots(index, match.node) == want


def test_tokens_that_lie_within_a_node_get_their_own_end(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    inserted = index.insert([1, 2], [])
    assert inserted.node.end == 2
    assert index.size().cold_pages == 4


def test_a_page_that_is_still_being_written_is_refused(paged):
    with pytest.raises(KVGrainError, match="6 tokens are no whole number of pages of 4"):
        paged.insert(np.arange(6), [Piece(0, 6, Cold(np.array([1, 2])))])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([hot(0, 4, 16)], "end at token 4 of 8"),
        ([hot(0, 4, 16), hot(0, 8, 20)], "should begin at token 4"),
        ([cold(0, [3], 4), cold(8, [4], 4)], "should begin at token 4"),
        ([hot(-4, 8, 16)], "should begin at token -4"),
        ([hot(0, 0, 16), hot(0, 8, 16)], "at least one page"),
        ([hot(0, 6, 16), hot(6, 8, 24)], "does not begin and end with a page"),
        ([hot(0, 8, 18)], "base is 18"),
        ([hot(0, 8, -4)], "base is -4"),
        ([Piece(0, 8, Cold(np.array([3])))], "has 1 pages of 4 tokens; it needs 2"),
        ([cold(0, [3, 3], 4)], "page 3 twice"),
        ([cold(0, [6], 4), hot(4, 8, 24)], "page 6 twice"),
        ([], "holds only the first 0"),
        ([cold(4, [6], 4)], "holds only the first 0"),
    ],
)
def test_pieces_that_do_not_fit_the_tokens_are_refused(paged, pieces, message):
    with pytest.raises(KVGrainError, match=message):
        paged.insert(np.arange(8), pieces)
    assert paged.size() == Size()


@pytest.mark.parametrize("pages", [[[1]], [0.5], [-1], [2**31]])
def test_pages_that_are_no_page_numbers_are_refused(pages):
    with pytest.raises(KVGrainError, match="COLD pages"):
        Cold(np.array(pages))


def test_a_negative_number_of_declared_tokens_is_refused(index):
    with pytest.raises(RequestError, match="declared is -1"):
        index.insert([1], [cold(0, [10])], declared=-1)


# -- duplicates and rejected tails -----------------------------------------------------------------


def test_of_two_copies_computed_at_once_the_first_survives(index):
    index.insert([1, 2, 3], [hot(0, 3, 0)])
    inserted = index.insert([1, 2, 3, 4], [hot(0, 3, 64), cold(3, [90])])
    (duplicate,) = inserted.duplicates
    assert (duplicate.start, duplicate.stop) == (0, 3)
    assert duplicate.yours == Hot(64)
    assert duplicate.kept == Hot(0)
    assert slots(index, inserted.node) == [0, 1, 2, 90]
    assert index.check_integrity().hot.tolist() == [[0, 3]]


def test_a_copy_of_a_part_is_a_duplicate_only_there(index):
    index.insert([1, 2, 3, 4], [cold(0, [10, 11, 12, 13])])
    inserted = index.insert([1, 2, 8, 9], [cold(0, [20, 21, 22, 23])])
    (duplicate,) = inserted.duplicates
    assert duplicate.yours.page_ids(2, 1).tolist() == [20, 21]
    assert duplicate.kept.page_ids(2, 1).tolist() == [10, 11]
    assert slots(index, inserted.node) == [10, 11, 22, 23]


def test_the_tail_of_a_duplicate_slab_joins_the_tree(paged):
    paged.insert(np.arange(8), [hot(0, 8, 0)])
    tokens = np.array([0, 1, 2, 3, 9, 9, 9, 9])
    inserted = paged.insert(tokens, [hot(0, 8, 32)])
    (duplicate,) = inserted.duplicates
    assert (duplicate.stop, duplicate.yours, duplicate.kept) == (4, Hot(32), Hot(0))
    assert inserted.node.tag == Hot(36)


def test_each_duplicate_lies_in_one_node_and_one_piece(index):
    index.insert([1, 2], [hot(0, 2, 0)])
    index.insert([1, 2, 3, 4], [cold(2, [12, 13])])
    inserted = index.insert([1, 2, 3, 4], [cold(0, [20, 21, 22]), cold(3, [23])])
    assert [(d.start, d.stop) for d in inserted.duplicates] == [(0, 2), (2, 3), (3, 4)]


def test_handing_over_the_same_slots_again_is_no_duplicate(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    inserted = index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    assert not inserted.duplicates
    assert index.size().cold_pages == 3


def test_a_piece_that_mixes_own_and_owned_pages_is_refused(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    before = index.size()
    with pytest.raises(KVGrainError, match=r"tokens \[0, 3\) mix pages"):
        index.insert([1, 2, 3, 4], [cold(0, [10, 21, 22, 23])])
    assert index.size() == before


def test_a_hot_tail_below_a_cold_node_stays_with_the_caller(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    inserted = index.insert([1, 2, 3, 4, 5], [hot(0, 4, 64), cold(4, [30])])
    assert [d.yours for d in inserted.duplicates] == [Hot(64)]
    assert places(inserted.rejected) == [(2, 4, 66), (4, 5, [30])]
    assert inserted.node.end == 2
    assert index.match([1, 2, 3]).length == 2


# -- hits and declared prefixes --------------------------------------------------------------------


def test_tokens_of_one_request_are_no_shared_prefix(index):
    node = index.insert([1, 2], [cold(0, [10, 11])]).node
    assert not node.is_prefix
    assert index.size().prefix_tokens == 0


def test_a_second_use_makes_a_shared_prefix_of_what_it_shares(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    node = index.lock(index.match([1, 2, 9]))
    assert (node.hits, node.is_prefix) == (2, True)
    (rest,) = node.children.values()
    assert (rest.hits, rest.is_prefix) == (1, False)
    assert index.size().prefix_tokens == 2


def test_locking_and_then_inserting_is_one_use(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    handle = index.lock(index.match([1, 2]))
    inserted = index.insert([1, 2, 3], [cold(2, [12])])
    index.extend(handle, inserted.node)
    assert [node.hits for node in index.path(inserted.node)] == [2, 1]


def test_computing_the_same_tokens_at_once_is_a_second_use(index):
    index.insert([1, 2], [cold(0, [10, 11])])
    assert index.insert([1, 2], [cold(0, [20, 21])]).node.hits == 2


def test_a_declared_prefix_ends_a_node_and_is_one_at_its_first_use(paged):
    inserted = paged.insert(np.arange(12), [cold(0, [3, 4, 5], 4)], declared=9)
    first, second = paged.path(inserted.node)
    assert (first.end, first.declared, first.is_prefix) == (8, True, True)
    assert (second.declared, second.is_prefix) == (False, False)
    assert paged.size().prefix_tokens == 8


def test_a_prefix_can_be_declared_when_it_is_in_the_index_already(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    inserted = index.insert([1, 2, 3, 4], [cold(3, [13])], declared=2)
    assert [(n.end, n.declared) for n in index.path(inserted.node)] == [
        (2, True),
        (3, False),
        (4, False),
    ]


def test_all_nodes_within_a_declared_prefix_are_declared(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    index.insert([1, 8], [cold(1, [20])])
    inserted = index.insert([1, 2, 3, 4], [cold(3, [13])], declared=100)
    assert all(node.declared for node in index.path(inserted.node))
    assert not index.match([1, 8]).node.declared


def test_a_declared_prefix_stays_one_when_others_use_or_split_it(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])], declared=3)
    index.insert([1, 2, 9], [cold(2, [20])])
    path = index.path(index.match([1, 2, 3]).node)
    assert [(node.end, node.declared) for node in path] == [(2, True), (3, True)]


def test_both_halves_of_a_split_node_have_been_used_as_often_as_the_whole(index):
    index.insert([1, 2, 3], [cold(0, [10, 11, 12])])
    index.unlock(index.lock(index.match([1, 2, 3])))
    index.lock(index.match([1]))
    assert [node.hits for node in index.path(index.match([1, 2, 3]).node)] == [3, 2]
