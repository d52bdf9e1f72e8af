"""Admission by exact footprint: which request runs, known to fit before a token of it is computed.

A request is admitted when the pages of all its head groups, those that decoding will fill included,
are free; they are taken at once and given back at once. Nothing is ever reclaimed while it runs, so
an admitted request always finishes. Source: Tangram §4.1.2, Equation 1.

Between its turns a conversation's pages stay as long as nobody needs them. Where more conversations take
turns than the pool holds, first come, first served drops each one's pages just before its next turn; so a
turn whose pages are still there goes before a request that would drop them, ``patience`` times at most.
"""

import dataclasses
import itertools

import numpy as np
from jaxtyping import Array, Bool

from kvgrain_jax.budgets.budget import BudgetPlan
from kvgrain_jax.budgets.groups import HeadGroups
from kvgrain_jax.budgets.ledger import Counts, HeadLedger, Table
from kvgrain_jax.budgets.shared import SharedPrefix
from kvgrain_jax.budgets.turns import Span, SpanPlan, pages_of, plan_spans
from kvgrain_jax.engine.request import Request
from kvgrain_jax.engine.serving import Line


@dataclasses.dataclass(frozen=True, eq=False)
class Holding:
    """Pages that a request or an idle conversation holds.

    Attributes:
      table: page table of each group.
      pages: pages of each group.
    """

    table: Table
    pages: Counts

    @property
    def n_pages(self) -> int:
        return int(self.pages.sum())


@dataclasses.dataclass(eq=False)
class Conversation:
    """Requests that continue each other.

    Attributes:
      plan: budgets of its prompts.
      spans: everything that was said and is, or was, in the cache.
      said: the last token of the last answer, which was never fed to the model.
      cache: pages that hold the spans; None before the first turn and after they were dropped.
      busy: a turn waits or runs.
    """

    plan: BudgetPlan
    spans: list[Span] = dataclasses.field(default_factory=list)
    said: list[int] = dataclasses.field(default_factory=list)
    cache: Holding | None = None
    busy: bool = False

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return sum(len(span.tokens) for span in self.spans) + len(self.said)


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request on its way through the engine.

    Attributes:
      request: what was asked.
      plan: budgets of its prompts.
      prompt: the spans up to its prompt, earlier turns included.
      conversation: what it continues, if anything.
      prefix: the shared prefix in front of ``prompt``, if any.
      fills: the prefix whose slab this sequence computes, if it does.
      tokens: generated tokens.
      order: place in the order of admission.
      passed: requests that went before it though it came first.
      plans: what every head holds around each span, ``Sequence.spans`` in that order.
      span: the span that is computed next, or behind the last.
      done: tokens of it that are computed.
      finite: for each chunk whether its scores are numbers, on the device.
      holding: its pages while it runs.
      decoding: whether everything is computed and the row decodes.
      first_token: when its first token was on the host, seconds of the run.
    """

    request: Request
    plan: BudgetPlan
    prompt: list[Span]
    conversation: Conversation | None = None
    prefix: SharedPrefix | None = None
    fills: SharedPrefix | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    order: int = 0
    passed: int = 0
    plans: list[SpanPlan] = dataclasses.field(default_factory=list)
    span: int = 0
    done: int = 0
    finite: list[Bool[Array, ""]] = dataclasses.field(default_factory=list)
    holding: Holding | None = None
    decoding: bool = False
    first_token: float = 0.0

    @property
    def spans(self) -> list[Span]:
        """What the cache holds once the row decodes: the prompt, and tokens said before a pause."""
        answer = np.asarray(self.tokens[:-1], np.int32)
        return [*self.prompt, Span(answer, False)] if answer.size else list(self.prompt)

    @property
    def n_context(self) -> int:
        """Tokens of ``spans`` and of the shared prefix in front of them."""
        return self.n_shared + sum(len(span.tokens) for span in self.spans)

    @property
    def n_shared(self) -> int:
        """Tokens of the shared prefix."""
        return self.prefix.n_tokens if self.prefix else 0

    def computed(self, n: int, finite: Bool[Array, ""]) -> None:
        """Note that the next ``n`` tokens are computed."""
        self.done += n
        self.finite.append(finite)
        if self.done == self.plans[self.span].n_tokens:
            self.span, self.done = self.span + 1, 0

    @property
    def growth(self) -> int:
        """Tokens that decoding may append: the last one is never fed to the model."""
        return self.request.max_new_tokens - max(1, len(self.tokens))

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` or ``"length"`` if the last token ended the request, else None."""
        if self.tokens and self.tokens[-1] in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_new_tokens else None


class HeadScheduler(Line[Sequence, Sequence]):
    """First come, first served but for turns whose pages are there; who is admitted can always finish.

    Args:
      ledger: the pool.
      groups: the head groups.
      policy: what turns keep.
      max_rows: requests that run at once.
      patience: how many requests may go before one that came first.

    Attributes:
      waiting: requests that are not yet admitted.
      rows: the running ones, by row of the batch.
      conversations: by name, least recently used first.
    """

    def __init__(
        self,
        ledger: HeadLedger,
        groups: HeadGroups,
        *,
        policy: str,
        max_rows: int,
        patience: int,
    ):
        super().__init__(max_rows)
        self.patience = patience
        self.ledger = ledger
        self.groups = groups
        self.policy = policy
        self.conversations: dict[str, Conversation] = {}
        self._order = itertools.count()

    def submit(self, sequence: Sequence) -> None:
        """Put a request at the end of the line.

        Raises:
          RequestError: its id is in use.
        """
        self._enter(sequence.request.id, sequence)
        if sequence.conversation:
            sequence.conversation.busy = True
        if sequence.prefix:
            sequence.prefix.users += 1

    def pages(self, sequence: Sequence) -> Counts:
        """Pages of each group that a request holds while it runs: its footprint."""
        return self._pages(sequence, self._plan(sequence), 0)

    def admit(self) -> list[int]:
        """Move requests from the front of the line into free rows while their pages are free.

        A request whose shared prefix is still being computed holds up the line.

        Returns:
          The rows that requests moved into.
        """
        new = []
        while self.waiting and None in self.rows and (row := self._reserve_next()):
            index = self.rows.index(None)
            self.waiting.remove(row)
            self.rows[index] = row
            new.append(index)
        return new

    def next_prompt(self) -> int | None:
        """Row of the request, admitted first, whose context is not yet computed."""
        rows = [i for i, row in enumerate(self.rows) if row and not row.decoding]
        return min(rows, key=lambda i: self.row(i).order, default=None)

    def row(self, index: int) -> Sequence:
        """The request in a row that is in use."""
        row = self.rows[index]
        assert row is not None, index
        return row

    def finish(self, index: int) -> None:
        """A request is done; a conversation keeps its pages, any other gives them back."""
        row = self.row(index)
        talk = row.conversation
        if talk is None:
            self._release(row)
        else:
            talk.spans, talk.said = row.spans, row.tokens[-1:]
            talk.cache, row.holding = row.holding, None
        self._leave(index)

    def drop(self, index: int) -> None:
        """A request ends before its time; its pages go back, its conversation is as before it."""
        self._release(self.row(index))
        self._leave(index)

    def preempt(self, index: int) -> None:
        """A request gives its pages back and waits, first in line, to be computed again."""
        row = self.row(index)
        self._release(row)
        row.decoding, row.plans, row.span, row.done, row.finite = False, [], 0, 0, []
        self.rows[index] = None
        self.waiting.appendleft(row)

    def withdraw(self, request_id: str) -> None:
        """Take a waiting request out of the line."""
        for row in [row for row in self.waiting if row.request.id == request_id]:
            self.waiting.remove(row)
            self._forget(row)

    def forget_cache(self, talk: Conversation) -> None:
        """Give back the pages of an idle conversation; its next turn computes them again."""
        if talk.cache:
            self.ledger.release(talk.cache.table, talk.cache.n_pages)
            talk.cache = None

    def _reserve_next(self) -> Sequence | None:
        """Reserve the pages of the request to admit next; None where none can be admitted."""
        first = self.waiting[0]
        if first.prefix and not first.prefix.ready:
            return None
        if first.passed < self.patience:
            if self._reserve(first, spare_waiting=True):
                return first
            for row in self.waiting:
                kept = row.conversation and row.conversation.cache
                if row is not first and kept and self._reserve(row, spare_waiting=True):
                    first.passed += 1
                    return row
        return first if self._reserve(first) else None

    def _reserve(self, row: Sequence, *, spare_waiting: bool = False) -> bool:
        """Take a request's pages, dropping idle conversations; not those that wait for a turn, if so
        asked, else those last."""
        cache = row.conversation.cache if row.conversation else None
        start = len(row.conversation.spans) if row.conversation and cache else 0
        plans = self._plan(row)
        pages = self._pages(row, plans, start)
        if cache:
            pages = np.maximum(pages, cache.pages)
        idle = [t for t in self.conversations.values() if t.cache and t is not row.conversation]
        if spare_waiting:
            idle = [talk for talk in idle if not talk.busy]
        idle.sort(key=lambda talk: talk.busy)
        need = int(pages.sum()) - (cache.n_pages if cache else 0)
        if need > self.ledger.free + sum(t.cache.n_pages for t in idle if t.cache):
            return False
        while need > self.ledger.free:
            self.forget_cache(idle.pop(0))
        table = self.ledger.reserve(
            pages, held=cache.pages if cache else None, table=cache.table if cache else None
        )
        assert table is not None  # counted above
        row.holding, row.plans, row.span = Holding(table, pages), plans, start
        row.order = next(self._order)
        if row.conversation:
            row.conversation.cache = None
        return True

    def _plan(self, row: Sequence) -> list[SpanPlan]:
        return plan_spans(row.spans, row.plan, self.policy, first=row.n_shared)

    def _pages(self, row: Sequence, plans: list[SpanPlan], start: int) -> Counts:
        page_size = self.ledger.geometry.page_size
        return pages_of(self.groups, plans[start:], row.growth, page_size)

    def _release(self, row: Sequence) -> None:
        if row.holding:
            self.ledger.release(row.holding.table, row.holding.n_pages)
            row.holding = None

    def _leave(self, index: int) -> None:
        self._forget(self.row(index))
        self.rows[index] = None

    def _forget(self, row: Sequence) -> None:
        self._ids.remove(row.request.id)
        if row.prefix:
            row.prefix.users -= 1
        for name, talk in list(self.conversations.items()):
            if talk is row.conversation:
                talk.busy = False
                self.conversations[name] = self.conversations.pop(name)  # most recently used
