"""Pools, index and scheduler at work without a model, beside plain-Python books of what is right.

Where a model would write the keys and values of a token, its slot is written with the number of the
token sequence that ends there, so a slot that is wrong after a split, a remapping, a promotion or
an eviction shows. Page tables are kept here as the batch keeps them on the device: they change only
when the scheduler says so.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from watched_cache import COLD_PAGES, HOT_PAGES, ROW_PAGES, WatchedCache

from kvgrain_jax.attention import make_rule
from kvgrain_jax.engine.request import Request
from kvgrain_jax.engine.rows import Row, plan_batch
from kvgrain_jax.engine.scheduler import Scheduler
from kvgrain_jax.errors import KVGrainError
from kvgrain_jax.pools import buffers, cold
from kvgrain_jax.prefix import Node

N_ROWS = 4
WRITE_TOKENS = 64
ANY_SHARED = 10**6  # so many shared tokens that no request ever waits for another's prefill

_allocate = jax.jit(cold.allocate)


@jax.jit
def _write(kv, slots, values):
    rows = values[:, None, None] * jnp.ones((1, 1, 2), jnp.float32)
    return buffers.write(kv, 0, slots, rows, -rows)


class Simulation:
    """An engine without a model.

    Args:
      page_size: 1, 4 or 16.
      policy: admission policy, ``always`` or ``after_hits:N``.
      min_pages: shorter prefixes stay in COLD.
      min_shared: shared tokens for which a request waits until another has computed them.
      patience: requests that may go before one that came first.
    """

    def __init__(
        self, page_size: int, policy: str, min_pages: int, min_shared: int, patience: int = 0
    ):
        self.page = page_size
        self.cache = WatchedCache(page_size, policy, min_pages * page_size)
        self.events = self.cache.events
        self.min_shared = min_shared
        self.scheduler = Scheduler(
            self.cache,
            max_rows=N_ROWS,
            chunk_tokens=3 * page_size + 1,
            chunk_requests=3,
            min_shared=min_shared,
            patience=patience,
        )
        self.line: list[Request] = []
        self.passed = 0
        self.submitted = 0
        self.numbers: dict[tuple[int, ...], int] = {}
        self.plans = itertools.cycle([("auto", 8), ("auto", 2), ("cascade16", 8)])

    # -- what callers do -------------------------------------------------------------------------

    def submit(
        self, letters: str, tail: int, new_pages: int, shared_pages: int, stops: bool
    ) -> None:
        """Queue a request of a page a letter and a few tokens more, which fits the empty pool."""
        prompt = text(letters, self.page) + [1] * (tail % self.page or not letters)
        most = ROW_PAGES * self.page - len(prompt) + 1
        request = Request(
            f"r{self.submitted}",
            prompt,
            max_new_tokens=min(new_pages * self.page + tail % self.page + 1, most),
            stop_tokens=(2,) if stops else (),
            shared_tokens=min(shared_pages * self.page + tail // 8, len(prompt)),
        )
        self.submitted += 1
        self.scheduler.submit(request)
        self.line.append(request)

    def abort(self, request_id: str) -> None:
        index = self.scheduler.find(request_id)
        if index is None:
            self.scheduler.withdraw(request_id)
            self.line = [r for r in self.line if r.id != request_id]
            self.events["abort while waiting"] += 1
        else:
            phase = "decode" if self.row(index).decoding else "prefill"
            self.events[f"abort in {phase}"] += 1
            self.leave(index)

    def drop_all(self) -> None:
        """Empty the index; refused, without a change, while a request runs."""
        if not self.scheduler.running:
            self.cache.drop_all()
            assert self.cache.index.size().nodes == 0
            return
        before = self.cache.state()
        try:
            self.cache.drop_all()
        except KVGrainError:
            assert self.cache.state() == before
        else:
            raise AssertionError("the index was emptied under a running request")

    # -- what an engine does ---------------------------------------------------------------------

    def admit(self) -> None:
        lent = self.cache.ledger.lent
        admission = self.scheduler.admit()
        for index in admission.moved:
            self.update_table(self.row(index))
            self.events["promotion under a decoding row"] += self.row(index).decoding
        self.events["lending"] += self.cache.ledger.lent > lent
        self.events["taking back"] += self.cache.ledger.lent < lent
        rows = [self.row(index) for index in admission.new]
        for row in rows:
            place = self.line.index(row.request)
            passed = [r for r in self.line[:place] if not self.is_computed_by_another(r)]
            if passed:
                assert 0 < self.min_shared <= row.reservation.cached
                self.events["cached request goes first"] += 1
            self.events["request waits for a prefix"] += place - len(passed)
            self.passed = self.passed + 1 if passed else 0
            assert self.passed <= self.scheduler.patience
            del self.line[place]

    def prefill(self) -> None:
        parts = self.scheduler.next_parts()
        assert sum(part.n_tokens for part in parts) <= self.scheduler.chunk_tokens
        for part in parts:
            self.write(self.row(part.row), part.first, part.first + part.n_tokens)
        for part in parts:
            row, moved = self.scheduler.computed(part)
            if part.completes:
                table = self.table(row)
                assert moved == (row.reservation.pages.tolist() != table)
                self.events["duplicate"] += row.reservation.pages.tolist() != table
                self.events["rejected HOT tail"] += row.reservation.slab is not None
                self.update_table(row)
                self.give(part.row, 1)

    def decode(self, n_steps: int, token: int) -> None:
        """Decode steps in which every row generates ``token``; pages are taken as the loop does."""
        self.scheduler.sort()
        self.check_plan()
        pool, n_free = self.cache.ledger.pools.cold, self.cache.ledger.cold_free
        finished = []
        for _ in range(n_steps):
            rows = [row for row in self.scheduler.running if row.decoding and row not in finished]
            starts = [row.kv_tokens.size % self.page == 0 for row in rows]
            need = np.zeros(ROW_PAGES, bool)
            need[: len(rows)] = starts
            pool, pages, ok = _allocate(pool, need)
            assert ok, "an admitted request found no page"
            n_free -= sum(starts)
            for row, starts_page, page in zip(rows, starts, pages.tolist(), strict=False):
                if starts_page:
                    self.table(row).append(page)
                    row.taken.append(page)
                row.tokens.append(token)
                self.write(row, row.kv_tokens.size - 1, row.kv_tokens.size)
                if row.finish_reason:
                    finished.append(row)
        self.cache.decoded(pool, n_free)
        for row in finished:
            self.leave(self.scheduler.rows.index(row))

    def step(self, token: int = 1) -> None:
        self.admit()
        self.prefill()
        self.decode(2 + self.page // 4, token)

    def run_to_the_end(self) -> None:
        """All that is submitted is served; then nothing is lost."""
        steps = 0
        while self.line or self.scheduler.running:
            self.step()
            self.check()
            steps += 1
            assert steps < 2000, "a request that fits the empty pool is never served"
        self.cache.drop_all()
        self.cache.ledger.take_back()
        ledger = self.cache.ledger
        assert (ledger.cold_free, ledger.outstanding, ledger.lent) == (COLD_PAGES, 0, 0)
        assert ledger.hot_limit == HOT_PAGES * self.page
        assert ledger.slabs == []
        self.check()

    def give(self, index: int, token: int) -> None:
        row = self.row(index)
        row.tokens.append(token)
        if row.finish_reason:
            self.leave(index)

    def leave(self, index: int) -> None:
        row = self.row(index)
        assert row.pages.tolist() == self.cache.tables.pop(row.reservation)
        self.scheduler.leave(index)

    # -- what must hold after every step -----------------------------------------------------------

    def check(self) -> None:
        holders = [(r, np.array(table, np.int32)) for r, table in self.cache.tables.items()]
        self.cache.check_integrity(holders)
        assert {row.reservation for row in self.scheduler.running} == set(self.cache.tables)
        assert list(self.scheduler.waiting) == self.line
        held = np.array(self.cache.ledger.kv.k[0])[:, 0, 0]
        assert np.array_equal(held, -np.array(self.cache.ledger.kv.v[0])[:, 0, 1])
        for row in self.scheduler.running:
            self.check_row(row, held)
        self.check_index(held)

    def check_row(self, row: Row, held: np.ndarray) -> None:
        """The page table and the contiguous pieces both name the KV of the row's own tokens."""
        want = self.fingerprints(self.context(row))
        slots = self.slots(row, 0, want.size)
        assert np.array_equal(held[slots], want)
        pieces = self.cache.contiguous_pieces(row.reservation)
        contiguous = [base + i for _, base, length in pieces for i in range(length)]
        assert contiguous[: want.size] == slots.tolist()[: len(contiguous)]

    def check_index(self, held: np.ndarray) -> None:
        """Every node holds the KV of the tokens that lead to its end, and of no others."""
        stack: list[tuple[Node, tuple[int, ...]]] = [(self.cache.index.root, ())]
        while stack:
            node, above = stack.pop()
            tokens = (*above, *node.tokens.tolist())
            offsets = np.arange(self.page)
            slots = (node.pages(self.page)[:, None] * self.page + offsets[None, :]).reshape(-1)
            assert np.array_equal(held[slots], self.fingerprints(tokens)[node.start :])
            stack += [(child, tokens) for child in node.children.values()]

    def check_plan(self) -> None:
        """A decode step reads every token of every row once, whatever is shared."""
        rows = self.scheduler.rows
        if not self.scheduler.n_decoding:
            return
        backend, max_segments = next(self.plans)
        rule = make_rule(backend)
        plan = plan_batch(rows, self.cache, rule=rule, group=1, max_segments=max_segments)
        segments = np.array(plan.device.segments)[: int(plan.device.n_segments)]
        starts = np.array(plan.device.starts)
        held = np.array(self.cache.ledger.kv.k[0])[:, 0, 0]
        for i, row in enumerate(rows):
            if row is None or not row.decoding:
                assert starts[i] == 0
                continue
            slots: list[int] = []
            for base, length, first, n in segments.tolist():
                if first <= i < first + n:
                    span = np.arange(base, base + length)
                    if backend == "cascade16":  # tokens of row 0 instead of slots
                        span = self.slots(rows[0], base, base + length)
                    slots += span.tolist()
            want = self.fingerprints(self.context(row))
            slots += self.slots(row, int(starts[i]), want.size).tolist()
            assert sorted(held[slots].tolist()) == sorted(want.tolist())
        self.events[f"{backend} plan with several segments"] += len(segments) > 1
        self.events[f"{backend} plan with a segment of several rows"] += any(segments[:, 3] > 1)

    # -- parts -----------------------------------------------------------------------------------

    def row(self, index: int) -> Row:
        row = self.scheduler.rows[index]
        assert row is not None
        return row

    def table(self, row: Row) -> list[int]:
        return self.cache.tables[row.reservation]

    def update_table(self, row: Row) -> None:
        pages = row.reservation.pages.tolist()
        self.table(row)[: len(pages)] = pages

    def context(self, row: Row) -> np.ndarray:
        """The tokens whose KV are written."""
        return row.kv_tokens if row.decoding else row.prompt[: row.computed]

    def slots(self, row: Row | None, start: int, stop: int) -> np.ndarray:
        assert row is not None
        position = np.arange(start, stop)
        pages = np.array(self.table(row), np.int64)[position // self.page]
        return pages * self.page + position % self.page

    def fingerprints(self, tokens) -> np.ndarray:
        """For each token the number of the sequence that ends with it."""
        prefix = tuple(int(token) for token in tokens)
        ends = range(1, len(prefix) + 1)
        return np.array(
            [self.numbers.setdefault(prefix[:end], len(self.numbers) + 1) for end in ends],
            np.float32,
        )

    def write(self, row: Row, start: int, stop: int) -> None:
        tokens = row.prompt[:stop] if not row.decoding else row.kv_tokens[:stop]
        slots = np.full(WRITE_TOKENS, self.cache.geometry.n_slots, np.int32)
        values = np.zeros(WRITE_TOKENS, np.float32)
        slots[: stop - start] = self.slots(row, start, stop)
        values[: stop - start] = self.fingerprints(tokens)[start:]
        self.cache.ledger.kv = _write(self.cache.ledger.kv, slots, values)

    def is_computed_by_another(self, request: Request) -> bool:
        """Whether a row that is not yet in the index computes a long part of the prompt."""
        prompt = np.asarray(request.prompt).tolist()
        cached = self.cache.index.match(prompt, limit=len(prompt) - 1).length

        def common(other: list[int]) -> int:
            n = 0
            while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
                n += 1
            return n

        return any(
            common(row.prompt.tolist()) - cached >= max(self.min_shared, 1)
            for row in self.scheduler.running
            if not row.decoding
        )


def text(letters: str, page_size: int) -> list[int]:
    """One page of tokens a letter; "a" and "b" differ in their last token only."""
    pages = {
        "a": [1] * page_size,
        "b": [1] * (page_size - 1) + [2],
        "c": [2] * page_size,
    }
    return [token for letter in letters for token in pages[letter]]
