"""The engine: requests in, tokens out, by continuous batching.

One ``step`` admits what fits, computes one chunk of prompts, and runs the decode loop for a few
steps. The scheduler decides; the engine has the device carry it out. What a request will hold is known
without its tokens, so the host plans the loop while the device computes the chunk.

A GPU has the host decide about every step of the loop, so that a call of it returns near its end. While
requests wait, the loop is launched behind the chunk at once and first tokens are handed out after it, which
keeps the device busy; when none waits, they are handed out before it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from kvgrain_jax.attention import fixed_choices
from kvgrain_jax.engine.batch import check_request
from kvgrain_jax.engine.config import EngineConfig
from kvgrain_jax.engine.device import Decoding, Device
from kvgrain_jax.engine.metrics import Sample, StepTrace
from kvgrain_jax.engine.model import Model
from kvgrain_jax.engine.request import Request
from kvgrain_jax.engine.rows import BatchPlan, Row
from kvgrain_jax.engine.scheduler import Scheduler
from kvgrain_jax.engine.serving import Serving, TokenEvent
from kvgrain_jax.errors import KVGrainError, PoolCorrupted, RequestError
from kvgrain_jax.prefix import PrefixCache
from kvgrain_jax.prefix.policy import parse as parse_policy


class Prefilling(NamedTuple):
    """A chunk of prompts that the device computes.

    Attributes:
      rows: for each part of a prompt in it the row, if the prompt is then complete.
      tokens: first token of each.
    """

    rows: list[Row | None]
    tokens: jax.Array


class Engine(Serving[Scheduler]):
    """Serves requests with one model on one device.

    Args:
      model: the language model.
      config: pools, batch, backend.

    Attributes:
      model, config: as given.
      cache: prefix index, pools and KV buffers.
      device: weights and batch.
      scheduler: waiting and running requests.
      metrics: what was measured so far.

    Raises:
      ConfigError: model and configuration do not fit together.
    """

    def __init__(self, model: Model, config: EngineConfig):
        self.model = model
        self.config = config
        geometry = config.geometry(model)
        self.max_context = min(config.max_context or model.max_context, model.max_context)
        row_pages = -(-self.max_context // geometry.page_size)
        policy = parse_policy(config.policy, config.min_hot_tokens)
        self.cache = PrefixCache(geometry, policy, row_pages, mesh=model.mesh)
        scheduler = Scheduler(
            self.cache,
            max_rows=config.max_batch,
            chunk_tokens=config.chunk_tokens,
            chunk_requests=config.chunk_requests,
            min_shared=config.min_hot_tokens,
            patience=config.patience,
        )
        super().__init__(scheduler, geometry.bytes_per_token)
        self.device = Device(model, config, self.cache)
        self._plan: BatchPlan | None = None
        self._unread: Prefilling | None = None
        self._decoding = False
        self._aborted: list[Row] = []  # rows that leave as soon as the device does not decode

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
          RequestError: it can never be served, or its id is in use; nothing was changed.
        """
        self.check(request)
        self.scheduler.submit(request)

    def check(self, request: Request) -> None:
        """Check that a request can be served at all.

        Raises:
          RequestError: it cannot; the message says why.
        """
        n_context = len(request.prompt)
        check_request(
            request,
            n_context=n_context,
            vocabulary=self.model.vocabulary,
            max_context=self.max_context,
            greedy=self.config.greedy,
        )
        total, geometry = n_context + request.max_new_tokens, self.cache.geometry
        pages = -(-(total - 1) // geometry.page_size)
        if pages > geometry.n_pages:
            raise RequestError(
                f"Request {request.id}: {total} tokens need {pages} pages, the whole pool has "
                f"{geometry.n_pages}; make the pool larger or the request shorter."
            )

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; what it held is freed.

        It may be called from ``on_event`` of ``run``: tokens handed out together with those of the event
        may still follow, later ones do not. While the device decodes, the row stays until the loop has
        ended.

        Raises:
          RequestError: there is no such request.
        """
        index = self.scheduler.find(request_id)
        if index is None:
            self.scheduler.withdraw(request_id)
        else:
            self._aborted.append(self.scheduler.row(index))
            if not self._decoding:
                self._leave([])

    def update_params(self, params) -> None:
        """Serve with other weights from now on; every cached prefix is forgotten.

        Raises:
          KVGrainError: a request is running.
        """
        if self.scheduler.running:
            raise KVGrainError("Requests are running; let them finish before the weights change.")
        self.cache.drop_all()
        self.device.params = params

    def check_integrity(self) -> None:
        """Check that pools, index, batch and scheduler agree; reads device state, so it is slow.

        Raises:
          PoolCorrupted: something does not agree.
        """
        page = self.cache.geometry.page_size
        tables = np.asarray(self.device.batch.pages)
        holders = []
        for row, table in zip(self.scheduler.rows, tables, strict=True):
            if row:
                tokens = row.kv_tokens.size if row.decoding else row.prompt.size
                pages = table[: -(-tokens // page)]
                if not np.array_equal(pages, row.pages):
                    raise PoolCorrupted(
                        f"Request {row.request.id} reads the pages {pages}; it holds {row.pages}."
                    )
                holders.append((row.reservation, pages))
        self.cache.check_integrity(holders)

    # -- the run ---------------------------------------------------------------------------------

    def prefill(self) -> list[TokenEvent]:
        """Only admit, and compute one chunk of prompts."""
        self._admit()
        chunk, left = self._launch_prefill(), []
        events = self._wait_prefill(chunk, left) if chunk else []
        self._leave(left)
        return events

    def decode(self, n_steps: int, backend: str | None = None) -> list[TokenEvent]:
        """Only decode: ``n_steps`` tokens of every row that decodes now.

        Args:
          n_steps: steps, at most ``config.decode_steps``.
          backend: takes the place of the dispatch, one of ``BACKENDS``; for measurements.
        """
        launch, left = self._next_loop(n_steps, backend), []
        events = self._wait_decode(launch(), left) if launch else []
        self._leave(left)
        return events

    def programs(self) -> list[tuple[str, Callable[[], object]]]:
        """See ``Serving.programs``."""
        device, config = self.device, self.config
        found: list[tuple[str, Callable[[], object]]] = [
            ("bookkeeping", device.compile_bookkeeping)
        ]
        for n in config.chunk_buckets:
            found.append((f"prefill of {n} tokens", partial(device.compute_chunk, [], n)))
        for n in config.batch_buckets:
            plan = device.plan(self.scheduler.rows[:n])
            found.append((f"decode of {n} rows", partial(device.compile_decode, plan)))
        return found

    # -- one step --------------------------------------------------------------------------------

    def _step(self) -> Iterator[TokenEvent]:
        self._admit()
        chunk = self._launch_prefill()
        launch = self._next_loop()
        # Without a decode loop behind it a chunk is read when the next one has been launched, so
        # that the device goes from chunk to chunk while the host packs.
        chunks = [c for c in (self._unread, chunk) if c]
        self._unread = chunks.pop() if chunk and not launch else None
        decoding: Decoding | None = None
        left: list[Row] = []  # rows that have ended
        try:
            if not self.scheduler.waiting:
                while chunks:
                    yield from self._wait_prefill(chunks.pop(0), left)
                launch = launch and self._next_loop()  # a row of it may have been aborted
            decoding = launch() if launch else None
            self._decoding = decoding is not None
            while chunks:
                yield from self._wait_prefill(chunks.pop(0), left)
        finally:
            # Whoever takes the events may have given up: the step is brought to its end all the same.
            self._decoding = False
            for unread in chunks:
                self._wait_prefill(unread, left)
            events = self._wait_decode(decoding, left) if decoding else []
            self._leave(left)
            if decoding:
                self._sample()
        yield from events

    def _admit(self) -> None:
        admission = self.scheduler.admit()
        for index in admission.moved:
            self.device.set_pages(index, self.scheduler.row(index))
        self.device.set_rows([(index, self.scheduler.row(index)) for index in admission.new])
        if admission.new or admission.moved:
            self._plan = None

    def _launch_prefill(self) -> Prefilling | None:
        """Start the next chunk; prompts that it completes decode from now on."""
        parts = self.scheduler.next_parts()
        if not parts:
            return None
        used = sum(part.n_tokens for part in parts)
        size = next(size for size in self.config.chunk_buckets if size >= used)
        tokens = self.device.compute_chunk(parts, size)
        rows: list[Row | None] = []
        with self.cache.ledger.together():
            for part in parts:
                row, moved = self.scheduler.computed(part)
                rows.append(row if part.completes else None)
                if moved:
                    self.device.set_pages(part.row, row)
                if part.completes:
                    self._plan = None
        return Prefilling(rows, tokens)

    def _wait_prefill(self, chunk: Prefilling, left: list[Row]) -> list[TokenEvent]:
        """Wait for the chunk; the first tokens of the prompts that it completed."""
        events = []
        for row, token in zip(chunk.rows, np.asarray(chunk.tokens), strict=False):
            if row and row in self.scheduler.rows:  # it may have been aborted meanwhile
                row.first_token = self.now
                events += self._give(row, [int(token)], left)
        return events

    def _next_loop(
        self, n_steps: int | None = None, backend: str | None = None
    ) -> Callable[[], Decoding] | None:
        """A call that starts the decode loop for the rows whose prompts are complete, if there are any."""
        n_active = self.scheduler.n_decoding
        if not n_active:
            return None
        n_rows = next(size for size in self.config.batch_buckets if size >= n_active)
        if self._plan is None:
            order = self.scheduler.sort()
            if order:
                self.device.reorder(order)
            self._plan = self.device.plan(self.scheduler.rows[:n_rows])
        plan = self._plan
        if backend is not None:
            choices = fixed_choices(self.device.rule, backend, n_rows=n_rows)
            plan = dataclasses.replace(plan, choices=choices)
        if n_steps is None:
            more_prompts = n_active < len(self.scheduler.running)
            config = self.config
            n_steps = config.prefill_decode_steps if more_prompts else config.decode_steps
        if not n_steps:
            return None
        # While requests wait, the loop ends when a sixteenth of the rows has finished: each return
        # costs a new plan and a chunk of prompts, an idle row costs little.
        quota = max(1, n_rows // 16) if self.scheduler.waiting else n_rows
        return partial(self.device.decode, plan, n_steps=n_steps, max_finished=quota)

    def _wait_decode(self, decoding: Decoding, left: list[Row]) -> list[TokenEvent]:
        """Wait for the loop; its tokens."""
        trace, plan = self.device.wait(decoding), decoding.plan
        tokens, pages = (np.asarray(x)[: int(trace.n_steps)] for x in (trace.tokens, trace.pages))
        for step in range(len(tokens)):
            backend = plan.choices.backends[trace.backend[step]]
            rows = int(trace.rows[step])
            read = plan.prefix_tokens_read(backend, tokens[step] >= 0)
            self.metrics.steps.append(
                StepTrace(backend, rows, rows * self.device.group, plan.reason(rows), read)
            )
        events = []
        columns = zip(tokens.T.tolist(), pages.T.tolist(), strict=True)
        for index, (column, taken) in enumerate(columns):
            new = [token for token in column if token >= 0]
            if new:
                row = self.scheduler.row(index)
                row.taken += [page for page in taken if page >= 0]
                events += self._give(row, new, left)
        return events

    # -- results ---------------------------------------------------------------------------------

    def _give(self, row: Row, new: list[int], left: list[Row]) -> list[TokenEvent]:
        """Take new tokens of a row; a finished one is noted in ``left``.

        Returns:
          Their event; none of a request that was aborted meanwhile.
        """
        row.tokens += new
        if row in self._aborted:
            return []
        reason = row.finish_reason
        if reason is not None:
            self.metrics.requests.append(row.metrics(finish=self.now))
            left.append(row)
        return [TokenEvent(row.request.id, tuple(new), reason is not None, reason)]

    def _leave(self, left: Sequence[Row]) -> None:
        """Free rows that have ended, and those aborted meanwhile, and what they held."""
        for row in self._aborted:
            self.device.deactivate(self.scheduler.rows.index(row))
        ended = {*left, *self._aborted}
        self._aborted.clear()
        with self.cache.ledger.together():
            for index, row in enumerate(self.scheduler.rows):
                if row in ended:
                    self.scheduler.leave(index)
        if ended:
            self._plan = None

    def _sample(self) -> None:
        ledger = self.cache.ledger
        self.metrics.samples.append(
            Sample(
                time=self.now,
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                hot_tokens=ledger.hot_tokens,
                cold_tokens=ledger.cold_tokens,
                lent_tokens=ledger.lent * self.cache.geometry.page_size,
                prefix_tokens=self.cache.index.size().prefix_tokens,
            )
        )
