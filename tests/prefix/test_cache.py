"""The prefix cache: what a request gets of HOT and COLD, from admission to its end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax.errors import KVGrainError, PoolCorrupted, PoolExhausted
from kvgrain_jax.pools import PoolGeometry, buffers, cold
from kvgrain_jax.prefix import Hot, Node, PrefixCache, Reservation, ledger
from kvgrain_jax.prefix.policy import parse

N_HOT, N_COLD, ALIGN, ROW_PAGES = 32, 40, 8, 72
_write = jax.jit(buffers.write, static_argnums=1, donate_argnums=0)
_allocate = jax.jit(cold.allocate)


class Cache(PrefixCache):
    """A cache over tiny pools that knows which requests run, with the pages each has taken."""

    def __init__(self, policy: str = "always", page_size: int = 1, n_hot: int = N_HOT):
        geometry = PoolGeometry(
            n_layers=2,
            n_kv_heads=1,
            head_dim=2,
            n_slots=N_HOT + N_COLD,
            n_hot=n_hot,
            page_size=page_size,
            slab_align=ALIGN,
            max_slabs=4,
        )
        super().__init__(geometry, parse(policy, min_tokens=4), ROW_PAGES)
        self.running: dict[Reservation, list[int]] = {}

    def admit(self, prompt, max_new: int = 1, shared: int = 0) -> Reservation:
        reservation = self.try_to_admit(prompt, max_new, shared)
        assert reservation is not None
        return reservation

    def try_to_admit(self, prompt, max_new: int = 1, shared: int = 0) -> Reservation | None:
        reservation = self.reserve(np.array(prompt), max_new_tokens=max_new, shared_tokens=shared)
        if reservation:
            self.running[reservation] = []
            for node in reservation.promoted:
                self.use_new_pages(node)
        self.check()
        return reservation

    def use_new_pages(self, node: Node) -> None:
        """As the scheduler does where a prefix of running requests has moved to HOT."""
        page = self.geometry.page_size
        for request in self.running:
            if node in self.index.path(request.node):
                request.pages[node.start // page : node.end // page] = node.pages(page)

    def complete(self, reservation: Reservation) -> None:
        self.commit(reservation)
        self.check()

    def end(self, reservation: Reservation, generated=()) -> None:
        """Finish a committed request, or cancel one in prefill."""
        pages = self.table(reservation)
        del self.running[reservation]
        if reservation.committed:
            tokens = np.concatenate([reservation.prompt, np.array(generated, np.int32)])
            self.finish(reservation, tokens, pages)
        else:
            self.cancel(reservation)
        self.check()

    def serve(self, prompt, shared: int = 0) -> Reservation:
        """A request from beginning to end, after which its prompt is cached."""
        reservation = self.admit(prompt, shared=shared)
        self.complete(reservation)
        self.end(reservation)
        return reservation

    def take_page(self, reservation: Reservation) -> None:
        """As a decode step that begins a page."""
        pool, pages, ok = _allocate(self.ledger.pools.cold, jnp.arange(ROW_PAGES) < 1)
        assert ok
        self.decoded(pool, self.ledger.cold_free - 1)
        self.running[reservation].append(int(pages[0]))

    def table(self, reservation: Reservation) -> np.ndarray:
        return np.array([*reservation.pages, *self.running[reservation]], np.int32)

    def check(self) -> None:
        self.check_integrity([(r, self.table(r)) for r in self.running])

    def state(self) -> tuple:
        """All that an admission may change, down to the free stack on the device."""

        def tree(node) -> tuple:
            children = sorted(tree(child) for child in node.children.values())
            return (node.id, node.end, node.is_hot, node.hits, node.lock_count, children)

        pools = [np.array(leaf).tolist() for leaf in jax.tree.leaves(self.ledger.pools)]
        counts = (self.ledger.cold_free, self.ledger.outstanding, self.ledger.lent)
        return pools, counts, self.ledger.slabs, tree(self.index.root)


@pytest.fixture
def cache():
    return Cache()


def tokens(letter: str, n: int) -> list[int]:
    """``n`` tokens of a text of its own for each letter."""
    return [100 * ord(letter) + i for i in range(n)]


def is_slab(pages) -> bool:
    """Whether pages of one token follow each other in HOT."""
    pages = list(pages)
    return pages == list(range(pages[0], pages[0] + len(pages))) and pages[-1] < N_HOT


# -- admission -------------------------------------------------------------------------------------


def test_a_declared_prefix_gets_a_slab_at_its_first_use_and_the_rest_of_the_prompt_pages(cache):
    request = cache.admit(tokens("a", 10), shared=6)
    assert is_slab(request.pages[:6])
    assert min(request.pages[6:]) >= N_HOT
    assert request.slab.stop == 6
    assert request.cached == 0


def test_slabs_begin_at_the_alignment(cache):
    first = cache.admit(tokens("a", 6), shared=5)
    second = cache.admit(tokens("b", 6), shared=5)
    assert [first.pages[0], second.pages[0]] == [0, ALIGN]


def test_an_undeclared_prompt_goes_to_cold(cache):
    request = cache.admit(tokens("a", 10))
    assert request.slab is None
    assert min(request.pages) >= N_HOT


def test_a_declared_prefix_below_the_smallest_hot_length_goes_to_cold(cache):
    assert cache.admit(tokens("a", 10), shared=3).slab is None


def test_a_prefix_that_finds_no_room_in_hot_is_served_from_cold(cache):
    running = cache.admit(tokens("a", 30), shared=28)
    request = cache.admit(tokens("b", 10), shared=6)
    assert request.slab is None
    assert min(request.pages) >= N_HOT
    assert running.slab.length == 28


def test_a_prefix_without_room_in_hot_takes_consecutive_pages_and_is_read_like_a_slab(cache):
    cache.admit(tokens("a", 30), shared=28)
    first = cache.admit(tokens("b", 10), shared=6)
    assert cache.contiguous_pieces(first) == [(-1, first.pages[0], 6)]
    cache.complete(first)
    second = cache.admit(tokens("b", 6) + tokens("c", 4), shared=6)
    ((_, base, length),) = cache.contiguous_pieces(second)
    assert second.pages[:6].tolist() == list(range(base, base + 6))
    assert (base >= N_HOT, length) == (True, 6)
    assert cache.contiguous_pieces(first) == cache.contiguous_pieces(second)


def test_where_cold_has_no_consecutive_pages_a_prefix_lies_anywhere(cache):
    cache.admit(tokens("a", 28), shared=27)
    others = [cache.admit(tokens(letter, 2), max_new=1) for letter in "bcdefghijklmnopqrst"]
    for other in others[::2]:
        cache.end(other)
    request = cache.admit(tokens("z", 8), shared=6)
    cache.complete(request)
    assert np.diff(request.pages[:6]).tolist() != [1] * 5
    assert cache.contiguous_pieces(request) == []


def test_a_prefix_larger_than_hot_is_served_from_cold_and_evicts_nothing(cache):
    cache.serve(tokens("a", 8), shared=8)
    request = cache.admit(tokens("b", 36), shared=34)
    assert request.slab is None
    assert cache.index.match(tokens("a", 8)).length == 8


def test_without_hot_everything_goes_to_cold():
    cache = Cache(n_hot=0)
    first = cache.admit(tokens("a", 10), shared=8)
    cache.complete(first)
    second = cache.admit(tokens("a", 8) + tokens("b", 2), shared=8)
    assert second.cached == 8
    assert second.pages[:8].tolist() == first.pages[:8].tolist()


def test_a_request_in_prefill_reads_its_slab_as_one_contiguous_piece_of_its_own(cache):
    request = cache.admit(tokens("a", 10), shared=6)
    assert cache.contiguous_pieces(request) == [(-1, 0, 6)]


def test_requests_share_the_contiguous_piece_of_one_node(cache):
    first = cache.admit(tokens("a", 6) + tokens("b", 2), shared=6)
    cache.complete(first)
    second = cache.admit(tokens("a", 6) + tokens("c", 2), shared=6)
    ((owner, base, length),) = cache.contiguous_pieces(first)
    assert (base, length) == (0, 6)
    assert owner in [node.id for node in cache.index.path(first.node)]
    assert cache.contiguous_pieces(second) == cache.contiguous_pieces(first)


def test_a_nested_prefix_gets_a_slab_of_its_own_behind_the_outer_one(cache):
    cache.serve(tokens("a", 6), shared=6)
    inner = cache.admit(tokens("a", 6) + tokens("b", 6), shared=11)
    assert inner.cached == 6
    assert (inner.slab.start, inner.slab.stop) == (6, 11)
    assert [piece[1:] for piece in cache.contiguous_pieces(inner)] == [(0, 6), (ALIGN, 5)]


# -- what is found in the cache --------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "cached"), [(1, 11), (4, 8)])
def test_of_a_prompt_that_is_cached_entirely_the_last_token_is_computed(page_size, cached):
    cache = Cache(page_size=page_size)
    cache.serve(tokens("a", 12))
    again = cache.admit(tokens("a", 12))
    assert again.cached == cached
    assert again.pages.size == 12 // page_size
    before = cache.ledger.cold_free
    cache.complete(again)
    # The page of the token that was computed again is a copy of one that the index has.
    assert cache.ledger.cold_free == before + 1
    assert again.pages.tolist() == cache.index.pages(again.node).tolist()


def test_a_prefix_shorter_than_a_page_is_not_cached():
    cache = Cache(page_size=4)
    request = cache.admit(tokens("a", 6), shared=3)
    assert (request.declared, request.slab) == (0, None)
    cache.complete(request)
    cache.end(request)
    assert cache.admit(tokens("a", 3) + tokens("b", 3)).cached == 0


def test_generated_tokens_are_cached_up_to_the_last_full_page():
    cache = Cache(page_size=4)
    request = cache.admit(tokens("a", 5), max_new=8)
    cache.complete(request)
    cache.take_page(request)
    generated = tokens("b", 6)
    cache.end(request, generated)  # 11 tokens: two full pages, and one that is given back
    assert cache.admit(tokens("a", 5) + generated + tokens("c", 3)).cached == 8


def test_a_request_aborted_in_prefill_leaves_nothing_behind(cache):
    before = cache.state()[1:]
    request = cache.admit(tokens("a", 12), max_new=6, shared=8)
    cache.end(request)
    counts, slabs, _ = cache.state()[1:]
    assert (counts, slabs) == before[:2]
    assert cache.admit(tokens("a", 12)).cached == 0


# -- two requests that compute one prefix ----------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 6])
def test_of_two_copies_computed_at_once_one_survives(cache, shared):
    first = cache.admit(tokens("a", 6) + tokens("b", 2), shared=shared)
    second = cache.admit(tokens("a", 6) + tokens("c", 2), shared=shared)
    assert not set(first.pages) & set(second.pages)
    kept, own = first.pages.tolist(), second.pages.tolist()
    cache.complete(first)
    free = (cache.ledger.cold_free, cache.ledger.hot_tokens)
    cache.complete(second)
    assert second.pages.tolist() == kept[:6] + own[6:]
    copies = (6, 0) if not shared else (0, -6)
    assert (cache.ledger.cold_free, cache.ledger.hot_tokens) == (
        free[0] + copies[0],
        free[1] + copies[1],
    )
    assert cache.contiguous_pieces(second) == cache.contiguous_pieces(first)


def test_the_part_of_a_slab_that_another_computed_in_cold_is_freed_and_the_rest_stays_its_own(
    cache,
):
    short = cache.admit(tokens("a", 6))
    long = cache.admit(tokens("a", 12), shared=10)
    cache.complete(short)
    cache.complete(long)
    assert long.pages[:6].tolist() == short.pages.tolist()
    assert (long.slab.start, long.slab.stop, long.slab.tag) == (6, 10, Hot(6))
    ((_, base, length),) = cache.contiguous_pieces(long)  # the other's pages happen to be a run
    assert (base, length) == (short.pages[0], 6)
    assert cache.ledger.hot_tokens == 4
    cache.end(long)
    assert cache.ledger.hot_tokens == 0
    assert cache.ledger.slabs == []


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 8])
def test_a_request_that_has_no_room_now_changes_nothing(cache, shared):
    cache.admit(tokens("a", 30), max_new=11, shared=0)
    cache.serve(tokens("b", 6), shared=6)
    before = cache.state()
    # COLD is taken, and 26 of the 32 HOT slots can be lent once the cached prefix is gone: 32.
    assert cache.try_to_admit(tokens("c", 20), max_new=14, shared=shared) is None
    assert cache.state() == before
    assert cache.try_to_admit(tokens("c", 20), max_new=13, shared=shared) is not None


def test_tokens_that_a_running_request_may_still_generate_are_not_given_away(cache):
    first = cache.admit(tokens("a", 10), max_new=40)  # 49 pages
    assert cache.try_to_admit(tokens("b", 24)) is None
    cache.admit(tokens("b", 23))
    cache.complete(first)
    for _ in range(39):
        cache.take_page(first)
    assert cache.ledger.cold_free == 0


def test_a_request_that_ends_early_gives_back_what_it_might_have_taken(cache):
    first = cache.admit(tokens("a", 10), max_new=40)
    cache.complete(first)
    cache.end(first, tokens("x", 0))
    assert cache.ledger.outstanding == 0
    assert cache.try_to_admit(tokens("b", 60)) is not None


def test_under_pressure_the_least_recently_used_pages_go_first(cache):
    cache.serve(tokens("a", 12))
    cache.serve(tokens("b", 12))
    cache.serve(tokens("a", 12))
    cache.admit(tokens("c", 50))  # 16 free, 32 lent: two pages are missing
    assert cache.index.match(tokens("a", 12)).length == 12
    assert cache.index.match(tokens("b", 12)).length == 0


def test_eviction_never_touches_what_a_running_request_uses(cache):
    running = cache.admit(tokens("a", 8) + tokens("b", 4), shared=8)
    cache.complete(running)
    pages = running.pages.tolist()
    for letter in "cdefg":
        cache.serve(tokens(letter, 26), shared=16)
    assert cache.try_to_admit(tokens("h", 61)) is None
    assert cache.index.match(tokens("a", 8) + tokens("b", 4)).length == 12
    assert running.pages.tolist() == pages == cache.index.pages(running.node).tolist()


def test_a_prefix_in_hot_is_evicted_for_one_that_is_needed_now_but_never_moved(cache):
    cache.serve(tokens("a", 16), shared=16)
    cache.serve(tokens("b", 16), shared=16)
    third = cache.admit(tokens("c", 16), shared=16)
    assert is_slab(third.pages)
    assert cache.index.match(tokens("a", 16)).length == 0  # the one used longest ago
    kept = cache.index.match(tokens("b", 16)).node
    assert cache.index.pages(kept).tolist() == list(range(16, 32))


def test_no_prefix_is_evicted_where_that_makes_no_hole(cache):
    cache.serve(tokens("a", 8), shared=8)
    cache.admit(tokens("b", 8), shared=8)  # [8, 16), running
    cache.serve(tokens("c", 16), shared=16)
    request = cache.admit(tokens("d", 20), shared=20)
    assert request.slab is None
    assert cache.index.match(tokens("a", 8)).length == 8
    assert cache.index.match(tokens("c", 16)).length == 16


def test_a_request_may_use_what_it_would_otherwise_evict(cache):
    cache.serve(tokens("a", 30))
    request = cache.admit(tokens("a", 30) + tokens("b", 38), max_new=5)  # the whole pool
    assert request.cached == 30
    assert (cache.ledger.spare, cache.ledger.lent) == (0, N_HOT)


# -- lending ---------------------------------------------------------------------------------------


def test_unused_hot_slots_are_lent_under_pressure_and_cold_takes_its_own_first(cache):
    first = cache.admit(tokens("a", 40))
    assert cache.ledger.lent == 0
    second = cache.admit(tokens("b", 5))
    assert cache.ledger.lent == 5
    assert min(first.pages) >= N_HOT
    assert sorted(second.pages) == [27, 28, 29, 30, 31]
    assert cache.ledger.hot_limit == 27


def test_a_live_slab_is_never_lent(cache):
    cache.admit(tokens("a", 6), shared=6)
    assert cache.try_to_admit(tokens("b", 67)) is None
    request = cache.admit(tokens("b", 66))
    assert min(request.pages) == 6


def test_lent_slots_come_back_when_all_are_free_and_a_slab_needs_them(cache):
    first, second = cache.admit(tokens("a", 40)), cache.admit(tokens("b", 20))
    cache.end(first)
    request = cache.admit(tokens("c", 20), shared=20)
    assert request.slab is None  # 20 of them are in use
    cache.end(second)
    cache.end(request)
    request = cache.admit(tokens("c", 20), shared=20)
    assert is_slab(request.pages)
    assert cache.ledger.lent == 0


def test_cached_tokens_of_finished_requests_do_not_keep_lent_slots_from_a_slab(cache):
    first, second = cache.admit(tokens("a", 40)), cache.admit(tokens("b", 20))
    for request in (first, second):
        cache.complete(request)
        cache.end(request)
    assert (cache.ledger.lent, cache.ledger.lent_in_use()) == (20, 20)
    request = cache.admit(tokens("c", 20), shared=20)
    assert is_slab(request.pages)
    assert cache.ledger.lent == 0
    assert cache.index.match(tokens("a", 40)).length == 40  # lies in COLD, so it stays cached
    assert cache.index.match(tokens("b", 20)).length == 0


def test_nothing_is_evicted_for_lent_slots_that_a_running_request_keeps(cache):
    first, second = cache.admit(tokens("a", 40)), cache.admit(tokens("b", 20))
    third = cache.admit(tokens("d", 2))
    for request in (first, second, third):
        cache.complete(request)
    cache.end(first)
    cache.end(second)
    request = cache.admit(tokens("c", 20), shared=20)
    assert request.slab is None
    assert cache.index.match(tokens("b", 20)).length == 20


def test_more_pages_than_a_request_holds_are_refused_and_none_is_taken(cache):
    free = cache.ledger.cold_free
    with pytest.raises(PoolExhausted, match="at most 72"):
        cache.ledger.take_pages(np.zeros(ROW_PAGES + 1, np.int32))
    assert cache.ledger.cold_free == free
    cache.check()


def test_lent_slots_that_are_promised_to_a_request_stay_lent(cache):
    first = cache.admit(tokens("a", 10), max_new=41)  # may take 40 pages more; 10 of them are lent
    request = cache.admit(tokens("b", 22), shared=22)
    assert is_slab(request.pages)
    assert cache.ledger.lent == 10
    cache.complete(first)
    for _ in range(40):
        cache.take_page(first)
    cache.check()


# -- promotion -------------------------------------------------------------------------------------


def fill_with_own_numbers(cache: Cache) -> np.ndarray:
    """Every slot of every layer gets its own keys and values; returns those of layer 0's keys."""
    slots = np.arange(cache.geometry.n_slots, dtype=np.int32)
    for layer in range(2):
        k = (slots + 1000 * layer + 0.5)[:, None, None] * np.ones((1, 1, 2))
        cache.ledger.kv = _write(
            cache.ledger.kv, layer, slots, k.astype(np.float32), -k.astype(np.float32)
        )
    return slots + 0.5


def layers(cache: Cache, pages) -> list[list[float]]:
    kv = cache.ledger.kv
    return [np.array(x)[np.array(pages), 0, 1].tolist() for x in (*kv.k, *kv.v)]


def test_a_prefix_moves_to_hot_when_a_second_request_shares_it(cache):
    cache.serve(tokens("a", 10))
    second = cache.admit(tokens("a", 6) + tokens("b", 4))
    assert is_slab(second.pages[:6])
    assert min(second.pages[6:]) >= N_HOT
    assert [node.end for node in second.promoted] == [6]


@pytest.mark.parametrize("copy_tokens", [ledger.COPY_TOKENS, 4])
def test_promotion_copies_keys_and_values_of_all_layers(cache, copy_tokens, monkeypatch):
    monkeypatch.setattr(ledger, "COPY_TOKENS", copy_tokens)
    first = cache.serve(tokens("a", 10))
    numbers = fill_with_own_numbers(cache)
    before = layers(cache, first.pages)
    second = cache.admit(tokens("a", 10) + tokens("b", 2))
    assert is_slab(second.pages[:10])
    assert layers(cache, second.pages[:10]) == before
    # No slot but those of the slab has changed.
    untouched = np.delete(np.arange(N_HOT + N_COLD), second.pages[:10])
    assert layers(cache, untouched)[0] == numbers[untouched].tolist()


def test_after_hits_promotes_at_the_nth_use_declared_or_not():
    cache = Cache("after_hits:3")
    first = cache.admit(tokens("a", 8), shared=6)
    assert first.slab is None
    cache.complete(first)
    second = cache.admit(tokens("a", 6) + tokens("b", 2), shared=6)
    assert second.promoted == ()
    third = cache.admit(tokens("a", 6) + tokens("c", 2))
    assert [node.end for node in third.promoted] == [6]
    assert is_slab(third.pages[:6])


def test_the_pages_that_a_promotion_empties_are_free_at_once(cache):
    cache.serve(tokens("a", 10))
    free = cache.ledger.cold_free
    cache.admit(tokens("a", 10) + tokens("b", 3))
    assert cache.ledger.cold_free == free + 10 - 3


def test_a_running_sharer_reads_a_promoted_prefix_from_its_new_slots_too():
    cache = Cache("after_hits:2")
    first = cache.admit(tokens("a", 8), max_new=4)
    cache.complete(first)
    numbers = fill_with_own_numbers(cache)
    before = numbers[first.pages].tolist()
    second = cache.admit(tokens("a", 6) + tokens("b", 2))
    (node,) = second.promoted
    assert node in cache.index.path(first.node)
    assert first.pages[:6].tolist() == second.pages[:6].tolist()
    assert cache.contiguous_pieces(first) == cache.contiguous_pieces(second)
    assert layers(cache, first.pages)[0] == before
    for _ in range(3):
        cache.take_page(first)
    cache.end(first, tokens("c", 3))
    cache.end(second)


def test_without_room_in_hot_a_prefix_stays_in_cold_and_is_promoted_later(cache):
    block = cache.admit(tokens("x", 30), shared=30)
    cache.serve(tokens("a", 6), shared=6)
    assert cache.admit(tokens("a", 6) + tokens("b", 2)).promoted == ()
    cache.end(block)
    later = cache.admit(tokens("a", 6) + tokens("c", 2))
    assert is_slab(later.pages[:6])


def test_a_chain_is_promoted_from_the_top(cache):
    block = cache.admit(tokens("x", 30), shared=30)
    cache.serve(tokens("a", 6), shared=6)
    cache.serve(tokens("a", 6) + tokens("b", 6), shared=12)
    cache.end(block)
    request = cache.admit(tokens("a", 6) + tokens("b", 6) + tokens("c", 1))
    assert [node.end for node in request.promoted] == [6, 12]
    assert [piece[2] for piece in cache.contiguous_pieces(request)] == [6, 6]


# -- emptying the cache ----------------------------------------------------------------------------


def test_the_cache_is_not_emptied_under_a_running_request(cache):
    cache.serve(tokens("b", 8))
    request = cache.admit(tokens("a", 8), shared=6)
    before = cache.state()
    with pytest.raises(KVGrainError, match="1 locks are held"):
        cache.drop_all()
    assert cache.state() == before
    cache.end(request)
    cache.drop_all()
    cache.check()
    assert cache.index.size().nodes == 0


def test_an_emptied_cache_has_all_its_slots(cache):
    for letter in "abcdef":
        cache.serve(tokens(letter, 20), shared=12)
        cache.serve(tokens(letter, 8) + tokens("z", 8))
    cache.drop_all()
    cache.ledger.take_back()
    cache.check()
    counts = (cache.ledger.cold_free, cache.ledger.hot_tokens, cache.ledger.lent)
    assert counts == (N_COLD, 0, 0)
    assert cache.admit(tokens("a", 20)).cached == 0


# -- what the checks find --------------------------------------------------------------------------


def test_the_check_finds_a_table_that_differs_from_the_index(cache):
    request = cache.admit(tokens("a", 8))
    cache.complete(request)
    request.pages[[0, 1]] = request.pages[[1, 0]]
    with pytest.raises(PoolCorrupted, match="page table differs from the index"):
        cache.check()


def test_the_check_finds_a_slot_that_nobody_owns(cache):
    request = cache.admit(tokens("a", 8))
    del cache.running[request]
    with pytest.raises(PoolCorrupted, match="8 slots do not have exactly one owner"):
        cache.check()


def test_the_check_finds_a_slot_with_two_owners(cache):
    first, second = cache.admit(tokens("a", 8)), cache.admit(tokens("b", 8))
    second.pages[0] = first.pages[0]
    with pytest.raises(PoolCorrupted, match="2 slots do not have exactly one owner"):
        cache.check()


def test_the_check_finds_a_promise_that_was_forgotten(cache):
    cache.admit(tokens("a", 8), max_new=5)
    cache.ledger.outstanding -= 1
    with pytest.raises(PoolCorrupted, match=r"3 pages count as committed.* take 4"):
        cache.check()


def test_the_check_finds_a_count_that_differs_from_the_device(cache):
    cache.ledger.cold_free -= 1
    with pytest.raises(PoolCorrupted, match="host counts 39 free COLD pages, the pools hold 40"):
        cache.check()


def test_pages_cannot_be_freed_twice(cache):
    pages = np.zeros(3, np.int32)
    cache.ledger.take_pages(pages)
    cache.ledger.free_pages(pages)
    with pytest.raises(PoolCorrupted, match="are free already"):
        cache.ledger.free_pages(pages[:1])
    cache.check()


def test_pages_taken_and_freed_together_are_those_taken_and_freed_one_by_one(cache):
    held = [np.zeros(n, np.int32) for n in (3, 5)]
    for pages in held:
        cache.ledger.take_pages(pages)
    new = [np.full(n, -1, np.int32) for n in (4, 1, 30)]
    with cache.ledger.together():
        cache.ledger.take_pages(new[0])
        cache.ledger.free_pages(held[0])
        cache.ledger.take_pages(new[1])
        cache.ledger.take_pages(new[2])
        assert cache.ledger.cold_free == 40 - 8 - 35 + 3
        assert np.all(new[0] == -1)
    taken = np.concatenate([held[1], *new])
    assert np.unique(taken).size == 40
    cache.ledger.check_counts()
    assert int(cache.ledger.pools.cold.n_free) == 0


def test_more_pages_than_are_free_cannot_be_taken(cache):
    with pytest.raises(PoolExhausted, match="41 COLD pages were asked for and 40 are free"):
        cache.ledger.take_pages(np.zeros(41, np.int32))
    cache.check()


def test_compiling_the_calls_changes_nothing(cache):
    cache.serve(tokens("a", 8), shared=8)
    cache.admit(tokens("b", 45))
    fill_with_own_numbers(cache)
    before, kv = cache.state(), layers(cache, range(N_HOT + N_COLD))
    cache.ledger.compile()
    assert cache.state() == before
    assert layers(cache, range(N_HOT + N_COLD)) == kv
