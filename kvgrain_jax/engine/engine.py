"""The engine: requests in, tokens out, by continuous batching.

One ``step`` admits what fits, computes one chunk of prompts, and runs the decode loop for a few
steps. The scheduler decides on the host; the engine carries it out on the device. Both programs of a
step are launched before either is waited for: what a request will hold is known without its tokens,
so the host plans the loop while the device computes the chunk, and hands out first tokens while the
loop runs.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvgrain_jax.attention import fixed_choices, kernel_shape
from kvgrain_jax.engine import batch as batches
from kvgrain_jax.engine.config import EngineConfig
from kvgrain_jax.engine.decode_loop import DecodeTrace, decode_loop
from kvgrain_jax.engine.metrics import RequestMetrics, Sample, StepTrace
from kvgrain_jax.engine.model import Model
from kvgrain_jax.engine.packing import PromptPart, pack_chunk
from kvgrain_jax.engine.prefill_step import prefill_step
from kvgrain_jax.engine.ranks import Ranks
from kvgrain_jax.engine.request import Request
from kvgrain_jax.engine.rows import BatchPlan, Row, plan_batch
from kvgrain_jax.engine.scheduler import Scheduler
from kvgrain_jax.engine.serving import Serving, TokenEvent
from kvgrain_jax.errors import KVGrainError, RequestError
from kvgrain_jax.pools import cold
from kvgrain_jax.prefix import PrefixCache
from kvgrain_jax.prefix.policy import parse as parse_policy


@dataclasses.dataclass(frozen=True, eq=False)
class _Decoding:
    """A decode loop that the device runs: its plan, and what it leaves."""

    plan: BatchPlan
    pool: cold.ColdState
    trace: DecodeTrace


class Engine(Serving[Scheduler]):
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
        self._ranks = Ranks.of(model)
        self.cache = PrefixCache(geometry, policy, row_pages, mesh=model.mesh)
        scheduler = Scheduler(
            self.cache,
            max_rows=config.max_batch,
            chunk_tokens=config.chunk_tokens,
            chunk_requests=config.chunk_requests,
            min_shared=config.min_hot_tokens,
        )
        super().__init__(scheduler, geometry.bytes_per_token)
        self._rule = config.dispatch_rule(model)
        self._group = model.n_heads // model.n_kv_heads
        ranks = self._ranks.size
        self._kernels = kernel_shape(
            model.n_heads // ranks, model.n_kv_heads // ranks, model.head_dim
        )
        self._batch = self._ranks.whole(batches.init(config.max_batch, row_pages))
        self._params = model.params
        self._plan: BatchPlan | None = None
        self._unread: tuple[list[Row | None], jax.Array] | None = None

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
        if self.config.greedy and request.sampling.temperature > 0:
            raise RequestError(
                f"{name}: temperature is {request.sampling.temperature}, but the engine was made for "
                "greedy requests only; set greedy to False in its configuration."
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
            self._batch = batches.deactivate(self._batch, np.int32(index))
            self._leave([index])

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
                pages = np.asarray(batches.row_pages(self._batch, np.full(1, index, np.int32)))[0]
                holders.append((row.reservation, pages[: -(-tokens // page)]))
        self.cache.check_integrity(holders)

    # -- the run ---------------------------------------------------------------------------------

    def prefill(self) -> list[TokenEvent]:
        """Only admit, and compute one chunk of prompts."""
        self._admit()
        left: list[int] = []
        events = list(self._wait_prefill(self._launch_prefill(), left))
        self._leave(left)
        return events

    def decode(self, n_steps: int, backend: str | None = None) -> list[TokenEvent]:
        """Only decode: ``n_steps`` tokens of every row that decodes now.

        Args:
          n_steps: steps, at most ``config.decode_steps``.
          backend: takes the place of the dispatch, one of ``BACKENDS``; for measurements.
        """
        decoding = self._launch_decode(n_steps, backend)
        left: list[int] = []
        events = list(self._wait_decode(decoding, left)) if decoding else []
        self._leave(left)
        return events

    def programs(self) -> list[tuple[str, Callable[[], object]]]:
        """See ``Serving.programs``."""

        def bookkeeping():
            self.cache.ledger.compile()
            self._batch = batches.compile_calls(self._batch, self.config.chunk_requests)

        def prefill(size: int):
            return lambda: self._launch_chunk([], size)

        def decode(n_rows: int):
            plan = self._make_plan(n_rows)
            return lambda: list(self._wait_decode(self._launch_loop(n_rows, plan, 0), []))

        found: list[tuple[str, Callable[[], object]]] = [("bookkeeping", bookkeeping)]
        found += [(f"prefill of {n} tokens", prefill(n)) for n in self.config.chunk_buckets]
        found += [(f"decode of {n} rows", decode(n)) for n in self.config.batch_buckets]
        return found

    # -- one step --------------------------------------------------------------------------------

    def _step(self) -> Iterator[TokenEvent]:
        self._admit()
        prefill = self._launch_prefill()
        decode = self._launch_decode()
        left: list[int] = []  # rows that have ended
        # Without a decode loop behind it a chunk is read when the next one has been launched, so
        # that the device goes from chunk to chunk while the host packs.
        unread, self._unread = [self._unread, prefill], None
        if decode is None:
            self._unread = unread.pop()
        for chunk in unread:
            yield from self._wait_prefill(chunk, left)
        if decode:
            yield from self._wait_decode(decode, left)
        self._leave(left)
        if decode:
            self._sample()

    def _admit(self) -> None:
        admission = self.scheduler.admit()
        for index in admission.moved:
            self._set_pages(index)
        new = [(index, self._row(index)) for index in admission.new]
        size = self.config.chunk_requests
        for start in range(0, len(new), size):
            self._batch = batches.set_rows(
                self._batch,
                *batches.rows_of(
                    [
                        (i, row.request, row.reservation.pages)
                        for i, row in new[start : start + size]
                    ],
                    n_rows=self.config.max_batch,
                    n_pages=self.cache.row_pages,
                    capacity=size,
                ),
            )
        if admission.new or admission.moved:
            self._plan = None

    def _launch_prefill(self) -> tuple[list[Row | None], jax.Array] | None:
        """Start the next chunk; prompts that it completes decode from now on.

        Returns:
          For each part of a prompt in it the row, if the prompt is then complete, and its first
          token.
        """
        parts = self.scheduler.next_parts()
        if not parts:
            return None
        used = sum(part.n_tokens for part in parts)
        size = next(size for size in self.config.chunk_buckets if size >= used)
        tokens = self._launch_chunk(parts, size)
        rows: list[Row | None] = []
        with self.cache.ledger.together():
            for part in parts:
                row, moved = self.scheduler.computed(part)
                rows.append(row if part.completes else None)
                if moved:
                    self._set_pages(part.row)
                if part.completes:
                    self._plan = None
        return rows, tokens

    def _wait_prefill(
        self, prefill: tuple[list[Row | None], jax.Array] | None, left: list[int]
    ) -> Iterator[TokenEvent]:
        """Wait for the chunk; hand out the first tokens of the prompts that it completed."""
        if prefill is None:
            return
        rows, tokens = prefill
        for row, token in zip(rows, np.asarray(tokens), strict=False):
            if row and row in self.scheduler.rows:  # it may have been aborted meanwhile
                row.first_token = self.now
                yield self._give(self.scheduler.rows.index(row), [int(token)], left)

    def _launch_decode(
        self, n_steps: int | None = None, backend: str | None = None
    ) -> "_Decoding | None":
        """Start the decode loop for the rows whose prompts are complete."""
        n_active = self.scheduler.n_decoding
        if not n_active:
            return None
        n_rows = next(size for size in self.config.batch_buckets if size >= n_active)
        if self._plan is None:
            order = self.scheduler.sort()
            if order:
                self._batch = batches.reorder(self._batch, np.asarray(order, np.int32))
            self._plan = self._make_plan(n_rows)
        plan = self._plan
        if backend is not None:
            choices = fixed_choices(self._rule, backend, n_rows=n_rows)
            plan = dataclasses.replace(plan, choices=choices)
        if n_steps is None:
            more_prompts = n_active < len(self.scheduler.running)
            config = self.config
            n_steps = config.prefill_decode_steps if more_prompts else config.decode_steps
        if not n_steps:
            return None
        return self._launch_loop(n_rows, plan, n_steps)

    def _wait_decode(self, decoding: "_Decoding", left: list[int]) -> Iterator[TokenEvent]:
        """Wait for the loop; hand out its tokens."""
        trace, n_free = jax.device_get((decoding.trace, decoding.pool.n_free))
        self.cache.decoded(decoding.pool, int(n_free))
        if trace.starved:
            raise KVGrainError("The COLD pool starved although every request had its pages.")
        plan = decoding.plan
        tokens = np.asarray(trace.tokens)[: int(trace.n_steps)]
        for step in range(len(tokens)):
            backend = plan.choices.backends[trace.backend[step]]
            rows = int(trace.rows[step])
            read = plan.prefix_tokens_read(backend, tokens[step] >= 0)
            self.metrics.steps.append(
                StepTrace(backend, rows, rows * self._group, plan.reason(rows), read)
            )
        for index, column in enumerate(tokens.T.tolist()):
            new = [token for token in column if token >= 0]
            if new:
                yield self._give(index, new, left)

    # -- device calls ----------------------------------------------------------------------------

    def _launch_chunk(self, parts: Sequence[PromptPart], size: int) -> jax.Array:
        geometry, ledger = self.cache.geometry, self.cache.ledger
        chunk = pack_chunk(
            parts,
            size=size,
            n_rows=self.config.max_batch,
            row_tokens=self.cache.row_pages * geometry.page_size,
            n_slots=geometry.n_slots,
            max_parts=self.config.chunk_requests,
            max_pieces=self.config.max_pieces,
            kernels=self._kernels,
        )
        ledger.kv, self._batch, tokens = prefill_step(
            self._params,
            ledger.kv,
            self._batch,
            self._ranks.whole(chunk),
            step=self.model.step,
            page_size=geometry.page_size,
            ranks=self._ranks,
        )
        return tokens

    def _launch_loop(self, n_rows: int, plan: BatchPlan, n_steps: int) -> "_Decoding":
        ledger = self.cache.ledger
        # While requests wait, the loop ends when a sixteenth of the rows has finished: each return
        # costs a new plan and a chunk of prompts, an idle row costs little.
        quota = max(1, n_rows // 16) if self.scheduler.waiting else n_rows
        ledger.kv, pool, self._batch, trace = decode_loop(
            self._params,
            ledger.kv,
            ledger.pools.cold,
            self._batch,
            plan.device,
            *self._ranks.whole(
                (jnp.asarray(plan.choices.table), jnp.int32(n_steps), jnp.int32(quota))
            ),
            step=self.model.step,
            n_rows=n_rows,
            max_steps=self.config.decode_steps,
            backends=plan.choices.backends,
            page_size=self.cache.geometry.page_size,
            greedy=self.config.greedy,
            ranks=self._ranks,
        )
        return _Decoding(plan, pool, trace)

    def _make_plan(self, n_rows: int) -> BatchPlan:
        plan = plan_batch(
            self.scheduler.rows[:n_rows],
            self.cache,
            rule=self._rule,
            group=self._group,
            max_segments=self.config.max_segments,
            kernels=self._kernels,
        )
        return dataclasses.replace(plan, device=self._ranks.whole(plan.device))

    def _set_pages(self, index: int) -> None:
        pages = self._row(index).reservation.pages
        table = np.zeros(self.cache.row_pages, np.int32)
        table[: len(pages)] = pages
        self._batch = batches.set_pages(self._batch, np.int32(index), table, len(pages))

    # -- results ---------------------------------------------------------------------------------

    def _row(self, index: int) -> Row:
        row = self.scheduler.rows[index]
        assert row is not None, index
        return row

    def _give(self, index: int, new: list[int], left: list[int]) -> TokenEvent:
        """Take new tokens of a row; a finished one is noted in ``left``."""
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
            left.append(index)
        return TokenEvent(row.request.id, tuple(new), reason is not None, reason)

    def _leave(self, left: Sequence[int]) -> None:
        """Free rows that have ended, and what they held."""
        size = self.config.chunk_requests
        with self.cache.ledger.together():
            for start in range(0, len(left), size):
                part = left[start : start + size]
                indices = np.zeros(size, np.int32)
                indices[: len(part)] = part
                pages = np.asarray(batches.row_pages(self._batch, indices))
                for index, of_row in zip(part, pages, strict=False):
                    self.scheduler.leave(index, of_row)
        if left:
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
