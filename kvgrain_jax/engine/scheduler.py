"""The scheduler: which request runs in which row, and which prompt tokens are computed next.

It decides on the host and owns the waiting line and the rows; the engine carries its decisions out
on the device.
"""

import dataclasses
import functools
import itertools
from collections import deque

import numpy as np

from kvgrain_jax.attention import HotPiece
from kvgrain_jax.engine.packing import PromptPart
from kvgrain_jax.engine.request import Request
from kvgrain_jax.engine.rows import Row, sort_key
from kvgrain_jax.engine.serving import Line
from kvgrain_jax.errors import KVGrainError
from kvgrain_jax.prefix import PrefixCache, Reservation


@dataclasses.dataclass
class Admission:
    """What an admission changed.

    Attributes:
      new: rows that a request has moved into.
      moved: rows whose page table changed because a prefix of theirs moved to HOT.
    """

    new: list[int] = dataclasses.field(default_factory=list)
    moved: list[int] = dataclasses.field(default_factory=list)


class Scheduler(Line[Request, Row]):
    """First come, first served, by a token budget: an admitted request can always finish.

    Where more prefixes are in use than the pools hold, first come, first served drops each one just before
    its next use; so a request whose prefix is still there goes before one that finds none, ``patience``
    times at most.

    Args:
      cache: pools and prefix index.
      max_rows: requests that run at once.
      chunk_tokens: prompt tokens computed at once.
      chunk_requests: requests whose prompts are computed at once.
      min_shared: a request waits while another computes a prefix of at least so many tokens that
        both share.
      patience: how many requests may go before one that came first.

    Attributes:
      waiting: requests that are not yet admitted.
      rows: the running ones, by row of the batch.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_rows: int,
        chunk_tokens: int,
        chunk_requests: int,
        min_shared: int,
        patience: int = 0,
    ):
        super().__init__(max_rows)
        self.cache = cache
        self.chunk_tokens = chunk_tokens
        self.chunk_requests = chunk_requests
        self.min_shared = max(min_shared, 1)
        self.patience = patience
        self._passed = 0  # requests that went before the first of the line
        self._order = itertools.count()

    @property
    def n_decoding(self) -> int:
        """Rows that decode."""
        return sum(row.decoding for row in self.running)

    def row(self, index: int) -> Row:
        """The request in a row that is in use.

        Raises:
          KVGrainError: the row is empty.
        """
        row = self.rows[index]
        if row is None:
            raise KVGrainError(f"Row {index} of the batch is empty.")
        return row

    def submit(self, request: Request) -> None:
        """Put a request at the end of the line.

        Raises:
          RequestError: its id is in use.
        """
        self._enter(request.id, request)

    def withdraw(self, request_id: str) -> None:
        """Take a waiting request out of the line."""
        self.waiting = deque(r for r in self.waiting if r.id != request_id)
        self._ids.remove(request_id)

    def admit(self) -> Admission:
        """Move requests from the line into free rows while pools and batch have room.

        A request that would compute a prefix which another one is just computing waits for it; the
        ones behind it may pass. A request that does not fit the pools now holds up the line.
        """
        with self.cache.ledger.together():
            return self._admit()

    def _admit(self) -> Admission:
        admission = Admission()
        held_back = []
        while self.waiting and None in self.rows:
            if self._is_being_computed(self.waiting[0]):
                held_back.append(self.waiting.popleft())
                continue
            place = self._next()
            request = self.waiting[place]
            reservation = self._reserve(request)
            if reservation is None:
                break
            del self.waiting[place]
            self._passed = self._passed + 1 if place else 0
            for node in reservation.promoted:
                admission.moved += self._use_new_pages(node)
            index = self.rows.index(None)
            self.rows[index] = Row(
                request, reservation, order=next(self._order), computed=reservation.cached
            )
            admission.new.append(index)
        self.waiting.extendleft(reversed(held_back))
        return admission

    def next_parts(self) -> list[PromptPart]:
        """The prompt tokens to compute next: the oldest requests first, several to a chunk."""
        prefill = [(i, row) for i, row in enumerate(self.rows) if row and not row.decoding]
        prefill.sort(key=lambda entry: entry[1].order)
        parts, left = [], self.chunk_tokens
        for index, row in prefill[: self.chunk_requests]:
            n = min(left, row.prompt.size - row.computed)
            if n:
                hot = tuple(HotPiece(*p) for p in self.cache.contiguous_pieces(row.reservation))
                parts.append(PromptPart(index, row.prompt, row.computed, n, hot))
            left -= n
        return parts

    def computed(self, part: PromptPart) -> tuple[Row, bool]:
        """Note that a part of a prompt is computed; a complete prompt joins the prefix index.

        Returns:
          ``(row, moved)``: the row, and whether its page table changed.
        """
        row = self.row(part.row)
        row.computed += part.n_tokens
        moved = False
        if part.completes:
            moved = self.cache.commit(row.reservation)
            row.decoding = True
        return row, moved

    def sort(self) -> list[int] | None:
        """Put rows that decode first, and those that share a prefix next to each other.

        Returns:
          For each row the one it was before; None if nothing changed.
        """

        def key(index: int):
            row = self.rows[index]
            if row is None or not row.decoding:
                return (1, (), index)
            return (0, sort_key(self.cache, row), index)

        order = sorted(range(len(self.rows)), key=key)
        if order == list(range(len(order))):
            return None
        self.rows = [self.rows[i] for i in order]
        return order

    def leave(self, index: int) -> None:
        """Free a row and what its request held."""
        row = self.row(index)
        if row.decoding:
            self.cache.finish(row.reservation, row.kv_tokens, row.pages)
        else:
            self.cache.cancel(row.reservation)
        self.rows[index] = None
        self._ids.remove(row.request.id)

    def _next(self) -> int:
        """Place in the line of the request to admit: the first, or, where that finds nothing in the
        cache, one that does."""
        if self._passed < self.patience and self._cached(self.waiting[0]) < self.min_shared:
            for place, request in enumerate(self.waiting):
                if self._cached(request) >= self.min_shared and not self._is_being_computed(
                    request
                ):
                    return place
        return 0

    def _cached(self, request: Request) -> int:
        """Tokens of the prompt that are in the index."""
        prompt = np.asarray(request.prompt)
        return self.cache.index.match(prompt, limit=prompt.size - 1).length

    def _reserve(self, request: Request) -> Reservation | None:
        reserve = functools.partial(
            self.cache.reserve,
            np.asarray(request.prompt),
            max_new_tokens=request.max_new_tokens,
            shared_tokens=request.shared_tokens,
        )
        reservation = reserve()
        if reservation is None and not self.running:
            # Nothing runs, so nothing will be freed: pieces of cached prefixes are in the way of
            # a request that fits the empty pool.
            self.cache.drop_all()
            reservation = reserve()
        return reservation

    def _is_being_computed(self, request: Request) -> bool:
        prompt, cached = np.asarray(request.prompt), self._cached(request)
        head = prompt[cached]
        for row in self.running:
            if row.reservation.committed or row.prompt.size <= cached:
                continue
            if row.prompt[cached] == head:  # nearly all prompts differ right behind what is cached
                n = min(prompt.size, row.prompt.size)
                differ = np.flatnonzero(prompt[:n] != row.prompt[:n])
                common = int(differ[0]) if differ.size else n
                if common - cached >= self.min_shared:
                    return True
        return False

    def _use_new_pages(self, node) -> list[int]:
        """Let running requests read a promoted node from its new slots; which rows they are."""
        page = self.cache.geometry.page_size
        moved = []
        for index, row in enumerate(self.rows):
            if row and node in self.cache.index.path(row.reservation.node):
                row.reservation.pages[node.start // page : node.end // page] = node.pages(page)
                moved.append(index)
        return moved
