"""The engine over head groups: requests in, tokens out, with prompts compressed as they come in.

One ``step`` admits what fits, computes one chunk of one prompt and runs the decode loop for a few
steps. Pages are taken at admission and given back at the end; nothing moves in between. Source:
Tangram §4.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np

from kvgrain_jax.budgets.admission import Conversation, HeadScheduler, Sequence
from kvgrain_jax.budgets.budget import BudgetPlan
from kvgrain_jax.budgets.chunk_scores import check_gates
from kvgrain_jax.budgets.device import HeadDevice
from kvgrain_jax.budgets.engine_config import HeadEngineConfig
from kvgrain_jax.budgets.gates import Gate
from kvgrain_jax.budgets.groups import Footprint, HeadGroups
from kvgrain_jax.budgets.ledger import HeadLedger
from kvgrain_jax.budgets.prefix_store import PrefixStore
from kvgrain_jax.budgets.turns import Span, SpanPlan
from kvgrain_jax.engine import batch as batches
from kvgrain_jax.engine.metrics import RequestMetrics
from kvgrain_jax.engine.model import Model
from kvgrain_jax.engine.request import Request
from kvgrain_jax.engine.serving import Serving, TokenEvent
from kvgrain_jax.errors import ConfigError, KVGrainError, RequestError


class HeadEngine(Serving[HeadScheduler]):
    """Serves requests with one model on one device, each KV head with its own budget of tokens.

    Args:
      model: the language model.
      plan: tokens that each head keeps of a prompt.
      groups: which heads share a page table.
      config: pool, batch, scorer, policy.
      gates: of all layers, where the scorer is ``gates``, see ``gates.read_gates``.

    Attributes:
      model, plan, groups, config: as given.
      device: pool and batch.
      scheduler: waiting and running requests, conversations.
      prefixes: prefixes that requests share.
      metrics: what was measured so far.

    Raises:
      ConfigError: model, plan, groups and configuration do not fit together.
    """

    def __init__(
        self,
        model: Model,
        plan: BudgetPlan,
        groups: HeadGroups,
        config: HeadEngineConfig,
        gates: Gate | None = None,
    ):
        heads = (model.n_layers, model.n_kv_heads)
        for name, shape in (
            ("budgets", plan.demands.shape),
            ("groups", (groups.n_layers, groups.n_kv_heads)),
        ):
            if shape != heads:
                raise ConfigError(
                    f"The {name} are of {shape[0]} layers of {shape[1]} KV heads, the model has "
                    f"{heads[0]} of {heads[1]}; make them for this model."
                )
        self.model, self.plan, self.groups, self.config = model, plan, groups, config
        self.max_context = min(config.max_context or model.max_context, model.max_context)
        check_gates(gates, model, config.scorer)
        self.device = HeadDevice(model, plan, groups, config, self.max_context, gates)
        self.prefixes = PrefixStore(self.ledger)
        bytes_per_token = (
            2 * plan.demands.size * model.head_dim * jnp.dtype(config.kv_dtype).itemsize
        )
        super().__init__(
            HeadScheduler(
                self.ledger,
                groups,
                policy=config.turns,
                max_rows=config.max_batch,
                patience=config.patience,
            ),
            bytes_per_token,
        )

    @property
    def ledger(self) -> HeadLedger:
        """The pool."""
        return self.device.ledger

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        conversation: str | None = None,
        retention: float | None = None,
    ) -> None:
        """Queue a request.

        Args:
          request: what to generate. In a conversation its prompt is what is new in this turn.
          conversation: name of the conversation that it continues or begins. Its cache is kept
            between turns while there is room, and computed again where there was not.
          retention: share of the prompt to keep, in (0, 1], where it differs from the engine's
            plan; for a conversation it is given with its first turn.

        Raises:
          ConfigError: the retention is outside (0, 1].
          RequestError: it can never be served, its id is in use, or the conversation still waits
            for an answer; nothing was changed.
        """
        sequence = self._sequence(request, conversation, retention)
        self._check(sequence)
        self.scheduler.check_ids([request.id])
        sequence, fills = self.prefixes.share(sequence)
        if fills:
            self.scheduler.submit(fills)
        self.scheduler.submit(sequence)
        if conversation is not None and sequence.conversation is not None:
            self.scheduler.conversations[conversation] = sequence.conversation

    def check(self, request: Request) -> None:
        """Check that a request without a conversation can be served at all.

        Raises:
          RequestError: it cannot; the message says why.
        """
        self._check(self._sequence(request, None, None))

    def footprint(self, request: Request, *, retention: float | None = None) -> Footprint:
        """What a request will hold from its admission to its end, to the byte: ``M(r)``.

        ``used_bytes`` counts the budgets and every token that it may generate.
        """
        sequence = self._sequence(request, None, retention)
        pages = int(self.scheduler.pages(sequence).sum())
        geometry = self.ledger.geometry
        tokens = sequence.plan.budgets(len(sequence.prompt[-1].tokens)) + sequence.growth
        item = jnp.dtype(geometry.dtype).itemsize
        return Footprint(
            pages, pages * geometry.page_bytes, int(tokens.sum()) * 2 * geometry.head_dim * item
        )

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; what it held is freed.

        Raises:
          RequestError: there is no such request.
        """
        index = self.scheduler.find(request_id)
        if index is None:
            self.scheduler.withdraw(request_id)
        else:
            self.device.deactivate(index)
            self.scheduler.drop(index)

    def preempt(self, request_id: str) -> None:
        """Take a running request's pages; it goes on later, first in line, with the same tokens.

        Raises:
          RequestError: there is no such request, or it does not run.
        """
        index = self.scheduler.find(request_id)
        if index is None:
            raise RequestError(f"Request {request_id} does not run, so it holds nothing.")
        self.device.deactivate(index)
        self.scheduler.preempt(index)

    def end_conversation(self, name: str) -> None:
        """Forget a conversation and free its cache.

        Raises:
          RequestError: there is no such conversation, or it waits for an answer.
        """
        self.scheduler.forget_cache(self._idle(name))
        del self.scheduler.conversations[name]

    def check_integrity(self) -> None:
        """Check that every page has one owner; reads device state, so it is slow.

        Raises:
          PoolCorrupted: one has none or two.
        """
        holdings = [row.holding for row in self.scheduler.running]
        holdings += [talk.cache for talk in self.scheduler.conversations.values()]
        self.ledger.check_integrity([holding.table for holding in holdings if holding])

    def programs(self) -> list[tuple[str, Callable[[], object]]]:
        """See ``Serving.programs``."""
        device, config = self.device, self.config
        # Chunks that keep everything, that choose, and that choose anew among earlier tokens.
        kinds = [(False, False), (True, False)]
        kinds += [(True, True)] if config.turns == "rebudget" else []
        found: list[tuple[str, Callable[[], object]]] = []
        for size in config.chunk_buckets:
            for selects, shrinks in kinds:
                what = "all again" if shrinks else "the best" if selects else "all"
                compile_chunk = partial(device.compile_chunk, size, selects, shrinks)
                found.append((f"prefill of {size} tokens, keeping {what}", compile_chunk))
        for n in config.batch_buckets:
            rows = self.scheduler.rows[:n]
            decode = partial(device.decode, rows, n_rows=n, n_steps=0, max_finished=n)
            found.append((f"decode of {n} rows", decode))
        return found

    # -- the run ---------------------------------------------------------------------------------

    def _step(self) -> Iterator[TokenEvent]:
        """See ``step``; a first token is handed out before the others are computed.

        Raises:
          KVGrainError: scores of a request are not numbers; that request has ended, its pages are
            free, the others go on.
        """
        yield from self.prefill()
        yield from list(self._decode())

    def prefill(self) -> list[TokenEvent]:
        """Only admit, and compute one chunk of a prompt; raises as ``step``."""
        self.scheduler.admit()
        return list(self._prefill())

    def _prefill(self) -> Iterator[TokenEvent]:
        index = self.scheduler.next_prompt()
        if index is None:
            return
        row = self.scheduler.row(index)
        n = self.device.chunk_size(row)
        selects = self._selects(row.plans[row.span], row.done + n)
        token, finite = self.device.compute_chunk(row, selects=selects)
        row.computed(n, finite)
        if row.span < len(row.plans):
            return
        if not all(bool(flag) for flag in row.finite):
            self._fail(index)
            raise KVGrainError(
                f"Request {row.request.id}: scores of its tokens are NaN, so none could be chosen; "
                "its keys, queries or weights are not finite."
            )
        if row.fills:
            self.device.store_prefix(row, row.fills)
            self.scheduler.drop(index)  # the pages it was computed in
            return
        self._after_context(row)
        row.decoding = True
        if row.tokens:  # it was pre-empted: what follows its context is known
            self.device.activate(index, row)
            return
        row.first_token = self.now
        row.tokens = [int(token[0])]
        yield from self._give(index, row.tokens)
        if not row.finish_reason:
            self.device.activate(index, row)

    def _selects(self, plan: SpanPlan, done: int) -> bool:
        """Whether tokens are scored and chosen in the chunk that ends after ``done`` tokens."""
        return plan.selects

    def _after_context(self, row: Sequence) -> None:
        """Called when a request's context is computed, before it decodes."""

    def _decode(self) -> Iterator[TokenEvent]:
        rows = [i for i, row in enumerate(self.scheduler.rows) if row and row.decoding]
        if not rows:
            return
        n_rows = next(size for size in self.config.batch_buckets if size > rows[-1])
        busy = len(rows) < len(self.scheduler.running)
        n_steps = self.config.prefill_decode_steps if busy else self.config.decode_steps
        quota = 1 if self.scheduler.waiting else n_rows
        tokens = self.device.decode(
            self.scheduler.rows, n_rows=n_rows, n_steps=n_steps, max_finished=quota
        )
        for index in rows:
            new = [int(token) for token in tokens[:, index] if token >= 0]
            if new:
                self.scheduler.row(index).tokens += new
                yield from self._give(index, new)

    def _fail(self, index: int) -> None:
        """End a request that cannot go on, and with a prefix all requests that wait for it."""
        prefix = self.scheduler.row(index).fills
        self.scheduler.drop(index)
        if prefix:
            for row in [row for row in self.scheduler.waiting if row.prefix is prefix]:
                self.scheduler.withdraw(row.request.id)
            self.prefixes.drop(prefix)

    def _give(self, index: int, new: list[int]) -> Iterator[TokenEvent]:
        """Hand out new tokens of a row; a finished one leaves the batch."""
        row = self.scheduler.row(index)
        reason = row.finish_reason
        if reason is not None:
            self.metrics.requests.append(
                RequestMetrics(
                    id=row.request.id,
                    arrival=row.request.arrival,
                    first_token=row.first_token,
                    finish=self.now,
                    prompt_tokens=len(row.request.prompt),
                    cached_tokens=row.n_shared,
                    tokens=tuple(row.tokens),
                    reason=reason,
                )
            )
            self.scheduler.finish(index)
        yield TokenEvent(row.request.id, tuple(new), reason is not None, reason)

    # -- checks ----------------------------------------------------------------------------------

    def _sequence(
        self, request: Request, conversation: str | None, retention: float | None
    ) -> Sequence:
        plan = self.plan
        if retention is not None:
            plan = dataclasses.replace(plan, retention=retention)
        prompt = np.asarray(request.prompt)
        if conversation is None:
            return Sequence(request, plan, [Span(prompt, True)])
        talk = Conversation(plan)
        if conversation in self.scheduler.conversations:
            talk = self._idle(conversation)
            if retention not in (None, talk.plan.retention):
                raise RequestError(
                    f"Conversation {conversation} keeps {talk.plan.retention} of its tokens since "
                    f"its first turn; {retention} is too late."
                )
        turn = Span(np.concatenate([np.asarray(talk.said, np.int32), prompt]), True)
        return Sequence(request, talk.plan, [*talk.spans, turn], talk)

    def _idle(self, name: str) -> Conversation:
        talk = self.scheduler.conversations.get(name)
        if talk is None:
            raise RequestError(f"There is no conversation {name!r} in the engine.")
        if talk.busy:
            raise RequestError(f"Conversation {name} still waits for an answer.")
        return talk

    def _check(self, sequence: Sequence) -> None:
        request = sequence.request
        batches.check_request(
            request,
            n_context=sequence.n_context,
            vocabulary=self.model.vocabulary,
            max_context=self.max_context,
            greedy=self.config.greedy,
        )
        pages, geometry = int(self.scheduler.pages(sequence).sum()), self.ledger.geometry
        if pages > geometry.n_pages - geometry.n_hot_pages:
            raise RequestError(
                f"Request {request.id}: its footprint is {pages} pages, the pool has "
                f"{geometry.n_pages - geometry.n_hot_pages}; make the pool larger, the retention "
                "smaller or the request shorter."
            )
