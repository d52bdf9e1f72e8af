"""The scheduler: who is admitted when, what is computed next, and in which order rows lie."""

import pytest
from watched_cache import COLD_PAGES, HOT_PAGES, WatchedCache

from kvgrain_jax import KVGrainError, Request, RequestError
from kvgrain_jax.attention import HotPiece, find_segments
from kvgrain_jax.engine.scheduler import Admission, Scheduler


class Line(Scheduler):
    """A scheduler of three rows over pools of 22 one-token pages, 10 of them HOT."""

    def __init__(
        self,
        *,
        policy: str = "always",
        min_shared: int = 3,
        chunk_tokens: int = 8,
        patience: int = 0,
    ):
        self.watched = WatchedCache(1, policy, min_tokens=2)
        super().__init__(
            self.watched,
            max_rows=3,
            chunk_tokens=chunk_tokens,
            chunk_requests=2,
            min_shared=min_shared,
            patience=patience,
        )

    def ask(self, name: str, prompt: list[int], max_new: int = 1, shared: int = 0) -> None:
        self.submit(Request(name, prompt, max_new, shared_tokens=shared))

    def names(self) -> list[str | None]:
        return [row.request.id if row else None for row in self.rows]

    def waiting_names(self) -> list[str]:
        return [request.id for request in self.waiting]

    def compute(self) -> list[tuple[str, int, int]]:
        """Compute the next chunk; which tokens of whom were in it."""
        done = []
        for part in self.next_parts():
            row, _ = self.computed(part)
            done.append((row.request.id, part.first, part.first + part.n_tokens))
            if part.completes:
                row.tokens.append(0)
                self.watched.tables[row.reservation] = row.reservation.pages.tolist()
        return done

    def end(self, name: str) -> None:
        index = self.find(name)
        assert index is not None
        row = self.rows[index]
        assert row is not None
        assert row.pages.tolist() == self.watched.tables.pop(row.reservation)
        self.leave(index)

    def have_cached(self, prompt: list[int]) -> None:
        """Compute a prompt for a request that then ends."""
        self.ask("cached", prompt)
        self.admit()
        self.compute()
        self.end("cached")


def new(start: int, n: int) -> list[int]:
    return list(range(start, start + n))


@pytest.fixture
def line():
    return Line()


# -- admission -------------------------------------------------------------------------------------


def test_requests_are_admitted_in_the_order_they_came(line):
    for i in range(5):
        line.ask(f"r{i}", new(10 * i, 3))
    assert line.admit() == Admission(new=[0, 1, 2], moved=[])
    assert line.names() == ["r0", "r1", "r2"]
    assert line.waiting_names() == ["r3", "r4"]


def test_a_freed_row_is_used_again(line):
    for i in range(4):
        line.ask(f"r{i}", new(10 * i, 3))
    line.admit()
    line.compute()
    line.end("r1")
    assert line.names() == ["r0", None, "r2"]
    assert line.admit().new == [1]
    assert line.names() == ["r0", "r3", "r2"]


def test_a_request_without_room_holds_up_the_line(line):
    line.ask("running", new(0, 4), max_new=9)
    line.ask("large", new(100, 12))
    line.ask("small", new(200, 2))
    line.admit()
    assert line.names() == ["running", None, None]
    assert line.waiting_names() == ["large", "small"]
    line.compute()
    line.end("running")
    line.admit()
    assert line.names() == ["large", "small", None]


def test_an_admitted_request_has_its_pages_promised(line):
    line.ask("first", new(0, 4), max_new=15)  # 18 of 22 pages
    line.ask("second", new(100, 4))
    line.ask("third", new(200, 1))
    line.admit()
    assert line.names() == ["first", "second", None]
    assert line.cache.ledger.outstanding == 14


def test_cached_prefixes_in_the_way_of_a_request_are_dropped_when_nothing_else_runs(line):
    # A prefix in the middle of HOT: what lies below it cannot be lent while it stays.
    line.ask("low", new(0, 4), shared=4)
    line.ask("high", new(100, 4), shared=4)
    line.admit()
    line.compute()
    line.end("high")
    line.end("low")
    line.ask("whole pool", new(100, 4) + new(200, 8), max_new=HOT_PAGES + COLD_PAGES - 12 + 1)
    assert line.admit().new == [0]
    assert line.cache.index.size().nodes == 0
    assert line.rows[0].computed == 0


# -- requests whose prefix is cached ---------------------------------------------------------------


def serve_in_turns(line: Line) -> list[tuple[str, int]]:
    """Five prefixes of eight tokens, asked for twice in turns, in pools that hold two of them.

    Returns:
      The requests in the order of their admission, and the tokens that each found in the cache.
    """
    for turn in range(2):
        for i, name in enumerate("abcde"):
            line.ask(f"{name}{turn}", [*new(100 * i, 8), 90 + turn])
    admitted = []
    while line.waiting or line.running:
        rows = [line.row(index) for index in line.admit().new]
        admitted += [(row.request.id, row.reservation.cached) for row in rows]
        line.compute()
        for row in line.running:
            if row.decoding:
                line.end(row.request.id)
    return admitted


def test_first_come_first_served_drops_each_prefix_before_its_next_use(line):
    assert serve_in_turns(line) == [(f"{n}{turn}", 0) for turn in range(2) for n in "abcde"]


def test_requests_whose_prefix_is_cached_go_first():
    admitted = serve_in_turns(Line(patience=9))
    assert sorted(admitted) == [(f"{n}{turn}", 8 * turn) for n in "abcde" for turn in range(2)]


def test_no_more_requests_than_patience_allows_go_before_one_that_came_first():
    line = Line(patience=2)
    line.have_cached(new(0, 6))
    line.ask("first", new(500, 3))
    for i in range(4):
        line.ask(f"r{i}", [*new(0, 6), 90 + i])
    line.admit()
    assert line.names() == ["r0", "r1", "first"]
    assert line.waiting_names() == ["r2", "r3"]


def test_a_request_that_waits_for_a_prefix_does_not_go_before_others():
    line = Line(patience=9)
    line.have_cached(new(0, 4))
    line.ask("computes", new(0, 8))
    line.ask("first", [70, 71, 72])
    line.ask("waits", [*new(0, 8), 90])
    line.admit()
    assert line.names() == ["computes", "first", None]
    assert line.waiting_names() == ["waits"]


# -- waiting for a prefix that is being computed ---------------------------------------------------


def test_a_request_waits_for_a_prefix_that_another_computes_and_others_pass(line):
    line.ask("first", [1, 2, 3, 4, 5])
    line.ask("shares", [1, 2, 3, 9])
    line.ask("other", [7, 7, 7])
    line.admit()
    assert line.names() == ["first", "other", None]
    assert line.waiting_names() == ["shares"]
    line.compute()
    line.admit()
    assert line.names() == ["first", "other", "shares"]
    assert line.rows[2].computed == 3


def test_a_few_shared_tokens_are_not_waited_for(line):
    line.ask("first", [1, 2, 3, 4, 5])
    line.ask("shares", [1, 2, 9, 9])
    line.admit()
    assert line.names() == ["first", "shares", None]


def test_what_is_cached_already_is_not_waited_for(line):
    line.ask("first", [1, 2, 3, 4])
    line.admit()
    line.compute()
    line.ask("second", [1, 2, 3, 4, 5, 6])
    line.ask("third", [1, 2, 3, 4, 5, 7])
    line.admit()
    assert line.names() == ["first", "second", "third"]


def test_unrelated_requests_do_not_wait_even_if_any_length_counts():
    line = Line(min_shared=0)
    line.ask("first", [1, 2, 3])
    line.ask("second", [4, 5, 6])
    line.admit()
    assert line.names() == ["first", "second", None]


def test_those_that_wait_for_a_prefix_keep_their_place(line):
    line.ask("first", [1, 2, 3, 4, 5])
    line.ask("shares", [1, 2, 3, 9])
    line.ask("too large", new(100, 18))
    line.admit()
    assert line.waiting_names() == ["shares", "too large"]


# -- prefill ---------------------------------------------------------------------------------------


def test_a_chunk_holds_the_oldest_prompts_first_and_is_never_exceeded(line):
    line.ask("first", new(0, 5))
    line.ask("second", new(100, 6))
    line.ask("third", new(200, 2))
    line.admit()
    assert line.compute() == [("first", 0, 5), ("second", 0, 3)]
    assert line.compute() == [("second", 3, 6), ("third", 0, 2)]
    assert line.compute() == []


def test_a_long_prompt_is_computed_in_parts_and_joins_the_index_when_complete(line):
    line.ask("long", new(0, 11))
    line.admit()
    assert line.compute() == [("long", 0, 8)]
    assert line.n_decoding == 0
    assert line.cache.index.match(new(0, 11)).length == 0
    assert line.compute() == [("long", 8, 11)]
    assert line.n_decoding == 1
    assert line.cache.index.match(new(0, 11)).length == 11


def test_only_tokens_that_are_not_cached_are_computed(line):
    line.ask("first", new(0, 5))
    line.admit()
    line.compute()
    line.ask("same", new(0, 5))
    line.admit()
    assert line.compute() == [("same", 4, 5)]


def test_a_part_names_the_contiguous_pieces_of_its_context(line):
    line.ask("first", new(0, 4), shared=3)
    line.admit()
    (part,) = line.next_parts()
    assert [(piece.base, piece.length) for piece in part.hot] == [(0, 3)]


# -- rows ------------------------------------------------------------------------------------------


def test_rows_that_share_a_prefix_lie_next_to_each_other_behind_them_those_in_prefill(line):
    line.ask("a1", [1, 2, 3, 10], shared=3)
    line.admit()
    line.compute()
    line.ask("b1", [5, 6, 7, 10], shared=3)
    line.ask("a2", [1, 2, 3, 11], shared=3)
    line.admit()
    assert line.names() == ["a1", "b1", "a2"]
    line.compute()
    order = line.sort()
    assert [["a1", "b1", "a2"][i] for i in order] == line.names()
    assert sorted(line.names()[:2]) == ["a1", "a2"] or sorted(line.names()[1:]) == ["a1", "a2"]
    pieces = [
        [HotPiece(*p) for p in line.cache.contiguous_pieces(row.reservation)]
        for row in line.running
    ]
    assert sorted(segment.n_rows for segment in find_segments(pieces)) == [1, 2]
    assert line.sort() is None


def test_rows_that_decode_come_first(line):
    line.ask("first", new(0, 2))
    line.ask("second", new(100, 2))
    line.admit()
    line.compute()
    line.end("first")
    line.ask("third", new(200, 3))
    line.admit()
    assert line.names() == ["third", "second", None]
    assert line.sort() == [1, 0, 2]
    assert line.names() == ["second", "third", None]


def test_running_rows_read_a_promoted_prefix_from_its_new_slots(line):
    line.ask("first", [1, 2, 3, 4])
    line.admit()
    line.compute()
    line.ask("second", [1, 2, 3, 9])
    admission = line.admit()
    assert admission == Admission(new=[1], moved=[0])
    first, second, _ = line.rows
    assert first.reservation.pages[:3].tolist() == [0, 1, 2]
    assert second.reservation.pages[:3].tolist() == [0, 1, 2]


# -- names -----------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused_and_free_again_afterwards(line):
    line.ask("a", [1, 2])
    with pytest.raises(RequestError, match="Request a: a request with this id is in the engine"):
        line.ask("a", [3])
    assert line.waiting_names() == ["a"]
    line.admit()
    line.compute()
    with pytest.raises(RequestError, match="Request a"):
        line.ask("a", [3])
    line.end("a")
    line.ask("a", [3])


def test_a_waiting_request_can_be_withdrawn(line):
    line.ask("a", [1, 2])
    line.ask("b", [3])
    assert line.find("a") is None
    line.withdraw("a")
    assert line.waiting_names() == ["b"]
    line.ask("a", [1, 2])


def test_an_unknown_request_is_named(line):
    with pytest.raises(RequestError, match="no request 'x'"):
        line.find("x")


def test_an_empty_row_cannot_leave(line):
    with pytest.raises(KVGrainError, match="Row 1 of the batch is empty"):
        line.leave(1)
