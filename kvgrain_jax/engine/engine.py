"""The engine: requests in, tokens out, by continuous batching.

One ``step`` admits what fits, computes one chunk of prompts, and runs the decode loop for a few
steps. The scheduler decides on the host; the engine carries it out on the device.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvgrain_jax.attention import make_rule
from kvgrain_jax.engine import batch as batches
from kvgrain_jax.engine.config import EngineConfig
from kvgrain_jax.engine.decode_loop import DecodeTrace, decode_loop
from kvgrain_jax.engine.metrics import RequestMetrics, RunMetrics, Sample, StepTrace
from kvgrain_jax.engine.model import Model
from kvgrain_jax.engine.packing import PromptPart, pack_chunk
from kvgrain_jax.engine.prefill_step import prefill_step
from kvgrain_jax.engine.request import Request
from kvgrain_jax.engine.rows import BatchPlan, Row, plan_batch
from kvgrain_jax.engine.scheduler import Scheduler
from kvgrain_jax.errors import KVGrainError, RequestError
from kvgrain_jax.prefix import PrefixCache
from kvgrain_jax.prefix.policy import parse as parse_policy


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """New tokens of one request.

    Attributes:
      id: the request.
      tokens: its new tokens, in order.
      finished: no more will follow.
      reason: ``"stop"`` or ``"length"`` where finished, else None.
    """

    id: str
    tokens: tuple[int, ...]
    finished: bool = False
    reason: str | None = None


class Engine:
    """Serves requests with one model on one device.

    Args:
      model: the language model.
      config: pools, batch, backend.

    Attributes:
      model, config: as given.
      cache: prefix index, pools and KV buffers.
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
        self.cache = PrefixCache(geometry, policy, row_pages)
        self.scheduler = Scheduler(
            self.cache,
            max_rows=config.max_batch,
            chunk_tokens=config.chunk_tokens,
            chunk_requests=config.chunk_requests,
            min_shared=config.min_hot_tokens,
        )
        self.metrics = RunMetrics(kv_bytes_per_token=geometry.bytes_per_token)
        self._rule = make_rule(config.backend, config.m_sat)
        self._group = model.n_heads // model.n_kv_heads
        self._batch = batches.init(config.max_batch, row_pages)
        self._params = model.params
        self._plan: BatchPlan | None = None
        self._start = time.perf_counter()

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
        name, prompt = f"Request {request.id}", np.asarray(request.prompt)
        largest = int(prompt.max())
        if largest >= self.model.vocabulary:
            raise RequestError(
                f"{name}: token id {largest} is outside the vocabulary of {self.model.vocabulary}."
            )
        total = prompt.size + request.max_new_tokens
        if total > self.max_context:
            raise RequestError(
                f"{name}: {prompt.size} prompt tokens and {request.max_new_tokens} new ones are "
                f"{total}, more than the context of {self.max_context}."
            )
        geometry = self.cache.geometry
        pages = -(-(total - 1) // geometry.page_size)
        if pages > geometry.n_pages:
            raise RequestError(
                f"{name}: {total} tokens need {pages} pages, the whole pool has "
                f"{geometry.n_pages}; make the pool larger or the request shorter."
            )
        batches.check_request(request)

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; what it held is freed.

        Raises:
          RequestError: there is no such request.
        """
        index = self.scheduler.find(request_id)
        if index is None:
            self.scheduler.withdraw(request_id)
        else:
            self._batch = batches.deactivate(self._batch, jnp.int32(index))
            self._leave(index)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._start

    def update_params(self, params) -> None:
        """Serve with other weights from now on; every cached prefix is forgotten.

        Raises:
          KVGrainError: a request is running.
        """
        if self.scheduler.running:
            raise KVGrainError("Requests are running; let them finish before the weights change.")
        self.cache.drop_all()
        self._params = params

    def check_integrity(self) -> None:
        """Check that pools, index, batch and scheduler agree; reads device state, so it is slow.

        Raises:
          PoolCorrupted: something does not agree.
        """
        page = self.cache.geometry.page_size
        holders = []
        for index, row in enumerate(self.scheduler.rows):
            if row:
                tokens = row.kv_tokens.size if row.decoding else row.prompt.size
                pages = np.asarray(batches.row_pages(self._batch, jnp.int32(index)))
                holders.append((row.reservation, pages[: -(-tokens // page)]))
        self.cache.check_integrity(holders)

    # -- the run ---------------------------------------------------------------------------------

    def run(
        self,
        requests: Iterable[Request],
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> RunMetrics:
        """Serve requests as they arrive, by the wall clock, until all are done.

        Args:
          requests: in any order; each is submitted ``arrival`` seconds after this call.
          on_event: called for every group of new tokens (streaming).

        Returns:
          The metrics of this run, also in ``self.metrics`` while it goes on.

        Raises:
          RequestError: a request can never be served, or an id is in use or given twice; no
            request was started.
        """
        pending = deque(sorted(requests, key=lambda request: request.arrival))
        for request in pending:
            self.check(request)
        self.scheduler.check_ids(request.id for request in pending)
        self.metrics = RunMetrics(kv_bytes_per_token=self.cache.geometry.bytes_per_token)
        self._start = time.perf_counter()
        while pending or self.has_work:
            while pending and pending[0].arrival <= self.now:
                self.submit(pending.popleft())
            if not self.has_work:
                time.sleep(max(0.0, pending[0].arrival - self.now))
                continue
            for event in self.step():
                if on_event:
                    on_event(event)
        return self.metrics

    def step(self) -> list[TokenEvent]:
        """Admit, compute one chunk of prompts, decode a few tokens of every active row."""
        self._admit()
        return self._prefill() + self._decode()

    def warmup(self) -> None:
        """Compile the programs of every bucket, so that no request waits for it."""
        self.cache.ledger.compile()
        self._batch = batches.compile_calls(self._batch)
        for size in self.config.chunk_buckets:
            self._call_prefill([], size)
        for n_rows in self.config.batch_buckets:
            self._call_decode(n_rows, self._make_plan(n_rows), 0)

    def _admit(self) -> None:
        admission = self.scheduler.admit()
        for index in admission.moved:
            self._set_pages(index)
        for index in admission.new:
            row = self._row(index)
            state = batches.row_of(row.request, row.reservation.pages, self.cache.row_pages)
            self._batch = batches.set_row(self._batch, jnp.int32(index), state)
        if admission.new or admission.moved:
            self._plan = None

    def _prefill(self) -> list[TokenEvent]:
        parts = self.scheduler.next_parts()
        if not parts:
            return []
        used = sum(part.n_tokens for part in parts)
        size = next(size for size in self.config.chunk_buckets if size >= used)
        tokens = self._call_prefill(parts, size)
        events = []
        for part, token in zip(parts, tokens, strict=False):
            row = self.scheduler.computed(part)
            if part.completes:
                self._set_pages(part.row)
                self._plan = None
                row.first_token = self.now
                events.append(self._give(part.row, [int(token)]))
        return events

    def _decode(self) -> list[TokenEvent]:
        n_active = self.scheduler.n_decoding
        if not n_active:
            return []
        n_rows = next(size for size in self.config.batch_buckets if size >= n_active)
        if self._plan is None:
            order = self.scheduler.sort()
            if order:
                self._batch = batches.reorder(self._batch, np.asarray(order, np.int32))
            self._plan = self._make_plan(n_rows)
        plan = self._plan
        trace = self._call_decode(n_rows, plan, self.config.decode_steps)
        if trace.starved:
            raise KVGrainError("The COLD pool starved although every request had its pages.")
        tokens = np.asarray(trace.tokens)[: int(trace.n_steps)]
        for step in range(len(tokens)):
            backend = self._rule.backends[trace.backend[step]]
            rows = int(trace.rows[step])
            read = plan.prefix_tokens_read(backend, tokens[step] >= 0)
            self.metrics.steps.append(StepTrace(backend, rows, rows * self._group, read))
        events = [
            self._give(index, [int(token) for token in tokens[:, index] if token >= 0])
            for index in range(n_active)
        ]
        self._sample()
        return events

    # -- device calls ----------------------------------------------------------------------------

    def _call_prefill(self, parts: Sequence[PromptPart], size: int) -> np.ndarray:
        geometry, ledger = self.cache.geometry, self.cache.ledger
        chunk = pack_chunk(
            parts,
            size=size,
            n_rows=self.config.max_batch,
            row_tokens=self.cache.row_pages * geometry.page_size,
            n_slots=geometry.n_slots,
            max_parts=self.config.chunk_requests,
            max_pieces=self.config.max_pieces,
        )
        ledger.kv, self._batch, tokens = prefill_step(
            self._params,
            ledger.kv,
            self._batch,
            chunk,
            step=self.model.step,
            page_size=geometry.page_size,
        )
        return np.asarray(tokens)

    def _call_decode(self, n_rows: int, plan: BatchPlan, n_steps: int) -> DecodeTrace:
        ledger = self.cache.ledger
        ledger.kv, pool, self._batch, trace = decode_loop(
            self._params,
            ledger.kv,
            ledger.pools.cold,
            self._batch,
            plan.device,
            jnp.int32(n_steps),
            jnp.bool_(bool(self.scheduler.waiting)),
            step=self.model.step,
            n_rows=n_rows,
            max_steps=self.config.decode_steps,
            rule=self._rule,
            page_size=self.cache.geometry.page_size,
            group=self._group,
        )
        trace, n_free = jax.device_get((trace, pool.n_free))
        self.cache.decoded(pool, int(n_free))
        return trace

    def _make_plan(self, n_rows: int) -> BatchPlan:
        return plan_batch(
            self.scheduler.rows[:n_rows],
            self.cache,
            backend=self.config.backend,
            max_segments=self.config.max_segments,
        )

    def _set_pages(self, index: int) -> None:
        pages = self._row(index).reservation.pages
        table = np.zeros(self.cache.row_pages, np.int32)
        table[: len(pages)] = pages
        self._batch = batches.set_pages(self._batch, jnp.int32(index), table, len(pages))

    # -- results ---------------------------------------------------------------------------------

    def _row(self, index: int) -> Row:
        row = self.scheduler.rows[index]
        assert row is not None, index
        return row

    def _give(self, index: int, new: list[int]) -> TokenEvent:
        """Take new tokens of a row; a finished row leaves the batch."""
        row = self._row(index)
        row.tokens += new
        reason = row.finish_reason
        if reason is not None:
            self.metrics.requests.append(
                RequestMetrics(
                    id=row.request.id,
                    arrival=row.request.arrival,
                    first_token=row.first_token,
                    finish=self.now,
                    prompt_tokens=row.prompt.size,
                    cached_tokens=row.reservation.cached,
                    tokens=tuple(row.tokens),
                    reason=reason,
                )
            )
            self._leave(index)
        return TokenEvent(row.request.id, tuple(new), reason is not None, reason)

    def _leave(self, index: int) -> None:
        pages = np.asarray(batches.row_pages(self._batch, jnp.int32(index)))
        self.scheduler.leave(index, pages)
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
