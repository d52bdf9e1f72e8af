"""The prefix index under random use, beside a model that knows nothing of nodes.

The model is a dictionary from every cached prefix (a tuple of tokens, whole pages) to the page that
holds its last tokens. What a slot holds is the tuple of all tokens up to it, as the KV of a real
model would, so a slot that is wrong after any split, remapping or promotion shows.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgrain_jax.prefix.node import Cold, Hot, Node, Piece
from kvgrain_jax.prefix.radix import RadixIndex

HOT_PAGES, COLD_PAGES = 14, 40

Tokens = tuple[int, ...]


@dataclasses.dataclass
class CachedPage:
    page: int
    used: int
    hits: int
    declared: bool

    @property
    def hot(self) -> bool:
        return self.page < HOT_PAGES


@dataclasses.dataclass(eq=False)
class LiveRequest:
    tokens: Tokens
    declared: int
    handle: Node
    locked: int
    table: list[int]
    own: set[int]


class IndexUnderRandomUse(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 4, 16]))
    def start(self, page_size: int) -> None:
        self.ps = page_size
        self.index = RadixIndex(page_size)
        self.cache: dict[Tokens, CachedPage] = {}
        self.slots: dict[int, Tokens] = {}
        self.free_hot = set(range(HOT_PAGES))
        self.free_cold = list(range(HOT_PAGES, HOT_PAGES + COLD_PAGES))
        self.live: list[LiveRequest] = []
        self.clock = 0

    # -- what requests do ------------------------------------------------------------------------

    @rule(
        letters=st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
        tail=st.integers(0, 15),
        slab=st.integers(0, 5),
        declared=st.integers(0, 4),
        cut=st.none() | st.integers(0, 5),
    )
    def begin(
        self, letters: list[str], tail: int, slab: int, declared: int, cut: int | None
    ) -> None:
        """Match and lock, then compute the rest into a slab and pages of the request's own."""
        tokens = self.text(letters) + (3,) * (tail % self.ps)
        match = self.index.match(tokens, limit=len(tokens) - 1)
        cached = self.cached_length(tokens[: len(tokens) - 1])
        assert match.length == cached
        handle = self.index.lock(match)
        self.touch(tokens[:cached], hits_from=0)
        new = -(-len(tokens) // self.ps) - cached // self.ps
        pages = self.take_slab(min(slab, len(tokens) // self.ps - cached // self.ps))
        if len(self.free_cold) < new - len(pages):
            self.give_back(pages)
            self.index.unlock(handle)
            self.touch(tokens[:cached])
            return
        pages += [self.free_cold.pop() for _ in range(new - len(pages))]
        table = [*self.model_pages(tokens[:cached]), *pages]
        self.write(tokens, cached, table)
        share = declared * self.ps + tail
        self.live.append(LiveRequest(tokens, share, handle, cached, table, set(pages)))
        if cut is not None:
            self.hand_over(self.live[-1], cut)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), cut=st.integers(0, 5))
    def store(self, data: Any, cut: int) -> None:
        self.hand_over(data.draw(st.sampled_from(self.live)), cut)

    def hand_over(self, request: LiveRequest, cut: int) -> None:
        """Insert the full pages; free what was there already and use the index's copy."""
        start, end = request.locked, len(request.tokens) // self.ps * self.ps
        tokens = request.tokens[:end]
        pieces = self.pieces(request.table, start, end, cut)
        held = self.cached_length(tokens)
        inserted = self.index.insert(tokens, pieces, request.declared)

        # The model, page by page.
        want_duplicates, want_rejected = {}, []
        for at in range(start, end, self.ps):
            page, prefix = request.table[at // self.ps], tokens[: at + self.ps]
            above = self.cache.get(tokens[:at])
            if at < held:
                want_duplicates[at] = (page, self.cache[prefix].page)
            elif want_rejected or (page < HOT_PAGES and above is not None and not above.hot):
                want_rejected.append(page)
            else:
                self.cache[prefix] = CachedPage(page, 0, 0, False)
                request.own.remove(page)
        stored = end - len(want_rejected) * self.ps
        shared = min(request.declared, end) // self.ps * self.ps
        self.touch(tokens[:stored], hits_from=start)
        for at in range(self.ps, min(shared, stored) + 1, self.ps):
            self.cache[tokens[:at]].declared = True

        duplicates = {
            at: pair
            for d in inserted.duplicates
            for at, pair in zip(
                range(d.start, d.stop, self.ps),
                zip(
                    d.yours.page_ids(d.stop - d.start, self.ps).tolist(),
                    d.kept.page_ids(d.stop - d.start, self.ps).tolist(),
                    strict=True,
                ),
                strict=True,
            )
        }
        assert duplicates == want_duplicates
        assert [int(p) for r in inserted.rejected for p in r.pages(self.ps)] == want_rejected
        assert inserted.node.end == stored
        for at, (yours, kept) in duplicates.items():
            request.own.remove(yours)
            self.give_back([yours])
            request.table[at // self.ps] = kept
        request.handle = self.index.extend(request.handle, inserted.node)
        request.locked = stored

    @precondition(lambda self: self.live)
    @rule(data=st.data(), letters=st.lists(st.sampled_from("ab"), min_size=1, max_size=2))
    def generate(self, data: Any, letters: list[str]) -> None:
        """Decode some tokens: they go on in the last page and in new COLD pages."""
        request = data.draw(st.sampled_from(self.live))
        tokens = request.tokens + self.text(letters)
        more = -(-len(tokens) // self.ps) - len(request.table)
        if len(self.free_cold) < more:
            return
        pages = [self.free_cold.pop() for _ in range(more)]
        written = len(request.tokens)
        request.tokens = tokens
        request.table += pages
        request.own |= set(pages)
        self.write(tokens, written, request.table)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), everyone=st.booleans())
    def finish(self, data: Any, everyone: bool) -> None:
        for request in list(self.live) if everyone else [data.draw(st.sampled_from(self.live))]:
            self.live.remove(request)
            self.index.unlock(request.handle)
            self.touch(request.tokens[: request.locked])
            self.give_back(request.own)

    # -- what the engine does --------------------------------------------------------------------

    @precondition(lambda self: self.cache)
    @rule(pool=st.sampled_from(["hot", "cold"]), pages=st.integers(0, 6))
    def evict(self, pool: str, pages: int) -> None:
        needed = pages * self.ps if pool == "hot" else pages
        freed = self.index.evict(pool, needed)
        got = last = 0
        for victim in self.victims(freed, pool):
            assert got < pages, "evicted more than was needed"
            last = len(victim[0].pages(self.ps))
            got += last
            self.check_victim(victim, pool)
            self.give_back([int(p) for piece in victim for p in piece.pages(self.ps)])
        if got < pages:
            assert not self.candidates(pool), "stopped although something could go"

    @precondition(lambda self: self.cache)
    @rule(data=st.data())
    def promote(self, data: Any) -> None:
        """Copy a COLD node to HOT; running requests use the new pages from here on."""
        prefix = data.draw(st.sampled_from(sorted(self.cache)))
        path = self.index.path(self.index.match(prefix).node)
        node = next((node for node in path if not node.is_hot), None)
        if node is None or not (pages := self.take_slab(node.length // self.ps)):
            return
        tokens = next(key for key in self.cache if len(key) >= node.end and self.lies_in(key, node))
        old = self.index.promote(node, pages[0] * self.ps)
        for at, source, page in zip(range(node.start, node.end, self.ps), old, pages, strict=True):
            assert self.cache[tokens[: at + self.ps]].page == source
            self.cache[tokens[: at + self.ps]].page = page
            for i in range(self.ps):
                self.slots[page * self.ps + i] = self.slots[int(source) * self.ps + i]
            for request in self.live:
                if at < request.locked and request.tokens[: at + self.ps] == tokens[: at + self.ps]:
                    request.table[at // self.ps] = page
        self.give_back(old.tolist())

    @precondition(lambda self: not self.live and len(self.cache) > 4)
    @rule()
    def drop_all(self) -> None:
        freed = [int(page) for piece in self.index.drop_all() for page in piece.pages(self.ps)]
        assert sorted(freed) == sorted(cached.page for cached in self.cache.values())
        self.cache.clear()
        self.give_back(freed)

    # -- what must hold after every step ---------------------------------------------------------

    @invariant()
    def slots_have_one_owner_each(self) -> None:
        owned = self.index.check_integrity()
        cached = {entry.page for entry in self.cache.values()}
        assert len(cached) == len(self.cache)
        hot = [np.arange(base, base + n, self.ps) // self.ps for base, n in owned.hot]
        assert {int(p) for part in hot for p in part} == {p for p in cached if p < HOT_PAGES}
        assert owned.cold.tolist() == sorted(p for p in cached if p >= HOT_PAGES)
        everything = [*cached, *self.free_hot, *self.free_cold]
        everything += [page for request in self.live for page in request.own]
        assert sorted(everything) == list(range(HOT_PAGES + COLD_PAGES))

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        for request in self.live:
            assert request.handle.end == request.locked
            table = self.index.pages(request.handle).tolist()
            assert table == request.table[: request.locked // self.ps]
            for i in range(len(request.tokens)):
                slot = request.table[i // self.ps] * self.ps + i % self.ps
                assert self.slots[slot] == request.tokens[: i + 1]

    @invariant()
    def every_cached_prefix_is_found_where_the_model_has_it(self) -> None:
        inner = {key[: -self.ps] for key in self.cache}
        for tokens in self.cache:
            if tokens in inner:
                continue
            match = self.index.match(tokens)
            assert match.length == len(tokens) == match.node.end
            for node in self.index.path(match.node):
                start, node_is_hot = node.start, node.is_hot
                for i, slot in enumerate(self.node_slots(node), start=start):
                    assert self.slots[slot] == tokens[: i + 1]
                for end in range(start + self.ps, node.end + 1, self.ps):
                    entry = self.cache[tokens[:end]]
                    assert (node_is_hot, node.hits) == (entry.hot, entry.hits)
                    assert node.declared == entry.declared

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        size = self.index.size()
        locked = self.locked()
        hot = [key for key, entry in self.cache.items() if entry.hot]
        cold = [key for key, entry in self.cache.items() if not entry.hot]
        prefixes = [e for e in self.cache.values() if e.declared or e.hits >= 2]
        assert size.hot_tokens == len(hot) * self.ps
        assert size.cold_pages == len(cold)
        assert size.locked_tokens == len(locked) * self.ps
        assert size.prefix_tokens == len(prefixes) * self.ps
        assert size.evictable_hot_tokens == sum(key not in locked for key in hot) * self.ps
        assert size.evictable_cold_pages == sum(key not in locked for key in cold)
        free = {
            page
            for r in self.index.hot_ranges()
            if r.evictable
            for page in range(r.base // self.ps, (r.base + r.length) // self.ps)
        }
        assert free == {self.cache[key].page for key in hot if key not in locked}

    # -- the model's parts -----------------------------------------------------------------------

    def text(self, letters: list[str]) -> Tokens:
        """One page a letter; "a" and "b" differ in their last token only."""
        pages = {"a": [1] * self.ps, "b": [1] * (self.ps - 1) + [2], "c": [2] * self.ps}
        return tuple(token for letter in letters for token in pages[letter])

    def cached_length(self, tokens: Tokens) -> int:
        length = 0
        while length + self.ps <= len(tokens) and tokens[: length + self.ps] in self.cache:
            length += self.ps
        return length

    def model_pages(self, tokens: Tokens) -> list[int]:
        ends = range(self.ps, len(tokens) + 1, self.ps)
        return [self.cache[tokens[:end]].page for end in ends]

    def touch(self, tokens: Tokens, hits_from: int | None = None) -> None:
        self.clock += 1
        for end in range(self.ps, len(tokens) + 1, self.ps):
            entry = self.cache[tokens[:end]]
            entry.used = self.clock
            entry.hits += hits_from is not None and end > hits_from

    def locked(self) -> set[Tokens]:
        return {
            request.tokens[:end]
            for request in self.live
            for end in range(self.ps, request.locked + 1, self.ps)
        }

    def candidates(self, pool: str) -> dict[Tokens, CachedPage]:
        """Last pages of what could be evicted: no page of the pool comes behind them."""
        locked = self.locked()
        inner = {key[: -self.ps] for key, e in self.cache.items() if pool == "cold" or e.hot}
        return {
            key: entry
            for key, entry in self.cache.items()
            if entry.hot == (pool == "hot") and key not in inner and key not in locked
        }

    def victims(self, freed: list[Piece], pool: str) -> list[list[Piece]]:
        """The pieces by the node that was evicted; a HOT one comes before its COLD company."""
        groups: list[list[Piece]] = []
        for piece in freed:
            if pool == "cold" or piece.is_hot:
                groups.append([])
            groups[-1].append(piece)
        return groups

    def check_victim(self, victim: list[Piece], pool: str) -> None:
        """It is the least recently used one, goes with all below it, and leaves the cache."""
        choice = self.candidates(pool)
        oldest = min(choice, key=lambda key: choice[key].used)
        node = victim[0]
        own = self.model_pages(oldest)[node.start // self.ps :]
        assert node.stop == len(oldest)
        assert node.pages(self.ps).tolist() == own
        gone = [key for key in self.cache if key[: node.stop] == oldest]
        gone += [oldest[:end] for end in range(node.start + self.ps, node.stop, self.ps)]
        pages = [int(page) for piece in victim for page in piece.pages(self.ps)]
        assert sorted(pages) == sorted(self.cache[key].page for key in gone)
        for key in gone:
            del self.cache[key]
        assert all(len(key) == self.ps or key[: -self.ps] in self.cache for key in self.cache)

    def take_slab(self, n: int) -> list[int]:
        for base in range(HOT_PAGES - n + 1):
            pages = list(range(base, base + n))
            if self.free_hot.issuperset(pages):
                self.free_hot -= set(pages)
                return pages
        return []

    def give_back(self, pages: Any) -> None:
        for page in pages:
            if page < HOT_PAGES:
                self.free_hot.add(page)
            else:
                self.free_cold.append(page)
            for slot in range(page * self.ps, (page + 1) * self.ps):
                self.slots.pop(slot, None)

    def write(self, tokens: Tokens, start: int, table: list[int]) -> None:
        for i in range(start, len(tokens)):
            self.slots[table[i // self.ps] * self.ps + i % self.ps] = tokens[: i + 1]

    def pieces(self, table: list[int], start: int, end: int, cut: int) -> list[Piece]:
        """Own pages as pieces: slabs as HOT, runs of COLD pages cut in two at page ``cut``."""
        entries = list(enumerate(table[start // self.ps : end // self.ps], start // self.ps))
        runs = itertools.groupby(
            entries,
            key=lambda e: ("hot", e[1] - e[0]) if e[1] < HOT_PAGES else ("cold", e[0] < cut),
        )
        pieces = []
        for (pool, _), run in runs:
            places, pages = zip(*run, strict=True)
            tag = Hot(pages[0] * self.ps) if pool == "hot" else Cold(np.array(pages, np.int32))
            pieces.append(Piece(places[0] * self.ps, (places[-1] + 1) * self.ps, tag))
        return pieces

    def node_slots(self, node: Node) -> list[int]:
        tag, length = node.tag, node.length
        if isinstance(tag, Hot):
            return [tag.base + i for i in range(length)]
        return [int(tag.pages[i // self.ps]) * self.ps + i % self.ps for i in range(length)]

    def lies_in(self, tokens: Tokens, node: Node) -> bool:
        path = self.index.path(node)
        return tokens[: node.end] == tuple(int(t) for part in path for t in part.tokens)


IndexUnderRandomUse.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestIndexUnderRandomUse = IndexUnderRandomUse.TestCase
