"""The device side of the engine: weights and batch, and the programs that change them.

Rows, parts of prompts and plans enter, from the host; arrays of tokens leave, on the device until they
are waited for.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from kvgrain_jax.attention import kernel_shape
from kvgrain_jax.engine import batch as batches
from kvgrain_jax.engine.config import EngineConfig
from kvgrain_jax.engine.decode_loop import DecodeTrace, decode_loop
from kvgrain_jax.engine.model import Model
from kvgrain_jax.engine.packing import PromptPart, pack_chunk
from kvgrain_jax.engine.prefill_step import prefill_step
from kvgrain_jax.engine.ranks import Ranks
from kvgrain_jax.engine.rows import BatchPlan, Row, plan_batch
from kvgrain_jax.errors import KVGrainError
from kvgrain_jax.pools import cold
from kvgrain_jax.prefix import PrefixCache


@dataclasses.dataclass(frozen=True, eq=False)
class Decoding:
    """A decode loop that the device runs: its plan, and what it leaves."""

    plan: BatchPlan
    pool: cold.ColdState
    trace: DecodeTrace


class Device:
    """Weights and batch of one engine; every program is started here, and none is waited for unasked.

    Args:
      model: the language model.
      config: batch, backend, sizes of the programs.
      cache: its pools and KV buffers are what the programs read and write.

    Attributes:
      params: weights that requests are served with.
      batch: the rows.
      rule: chooses the backends.
      group: ``G``, query heads of one KV head.

    Raises:
      ConfigError: see ``EngineConfig.dispatch_rule``.
    """

    def __init__(self, model: Model, config: EngineConfig, cache: PrefixCache):
        self.model, self.config, self.cache = model, config, cache
        self.params = model.params
        self.rule = config.dispatch_rule(model)
        self.group = model.n_heads // model.n_kv_heads
        self._ranks = Ranks.of(model)
        ranks = self._ranks.size
        self._kernels = kernel_shape(
            model.n_heads // ranks, model.n_kv_heads // ranks, model.head_dim
        )
        self.batch = self._ranks.whole(batches.init(config.max_batch, cache.row_pages))
        # Long page tables are most of what a new row sends to the device.
        self._row_buckets = sorted(
            {n for n in (1, 4) if n < config.chunk_requests} | {config.chunk_requests}
        )

    # -- rows ------------------------------------------------------------------------------------

    def set_rows(self, new: Sequence[tuple[int, Row]]) -> None:
        """Put requests that are not yet computed into rows, by their index."""
        entries = [(index, row.request, row.reservation.pages) for index, row in new]
        while entries:
            size = next((n for n in self._row_buckets if n >= len(entries)), self._row_buckets[-1])
            rows = batches.rows_of(
                entries[:size],
                n_rows=self.config.max_batch,
                n_pages=self.cache.row_pages,
                capacity=size,
            )
            self.batch = batches.set_rows(self.batch, *rows)
            entries = entries[size:]

    def set_pages(self, index: int, row: Row) -> None:
        """Let a row read the pages that its request holds now."""
        pages = row.reservation.pages
        table = np.zeros(self.cache.row_pages, np.int32)
        table[: len(pages)] = pages
        self.batch = batches.set_pages(self.batch, np.int32(index), table, len(pages))

    def reorder(self, order: Sequence[int]) -> None:
        """Row ``i`` is from now on what row ``order[i]`` was."""
        self.batch = batches.reorder(self.batch, np.asarray(order, np.int32))

    def deactivate(self, index: int) -> None:
        """A row decodes no more."""
        self.batch = batches.deactivate(self.batch, np.int32(index))

    def compile_bookkeeping(self) -> None:
        """Compile the calls of pools and batch by ones that change nothing."""
        self.cache.ledger.compile()
        self.batch = batches.compile_calls(self.batch, self._row_buckets)

    # -- programs --------------------------------------------------------------------------------

    def compute_chunk(self, parts: Sequence[PromptPart], size: int) -> Int[Array, "R"]:
        """Start a chunk of ``size`` prompt tokens; see ``prefill_step.prefill_step``.

        Args:
          parts: what is in it; the rest is padding.
          size: one of ``config.chunk_buckets``.

        Returns:
          For each part the first token of its request, if the part completes the prompt.
        """
        geometry, ledger = self.cache.geometry, self.cache.ledger
        row_tokens = self.cache.row_pages * geometry.page_size
        staged = self.config.max_staged
        if staged is None:
            staged = max(row_tokens, 16 * size) if self._kernels else 0
        chunk = pack_chunk(
            parts,
            size=size,
            n_rows=self.config.max_batch,
            row_tokens=row_tokens,
            n_slots=geometry.n_slots,
            max_parts=self.config.chunk_requests,
            max_pieces=self.config.max_pieces,
            max_staged=min(staged, geometry.n_slots),
            kernels=self._kernels,
        )
        ledger.kv, self.batch, tokens = prefill_step(
            self.params,
            ledger.kv,
            self.batch,
            self._ranks.whole(chunk),
            step=self.model.step,
            page_size=geometry.page_size,
            ranks=self._ranks,
        )
        return tokens

    def plan(self, rows: Sequence[Row | None]) -> BatchPlan:
        """Plan the decode steps of the first rows of the batch, a bucket; see ``rows.plan_batch``."""
        plan = plan_batch(
            rows,
            self.cache,
            rule=self.rule,
            group=self.group,
            max_segments=self.config.max_segments,
            kernels=self._kernels,
        )
        return dataclasses.replace(plan, device=self._ranks.whole(plan.device))

    def decode(self, plan: BatchPlan, *, n_steps: int, max_finished: int) -> Decoding:
        """Start the decode loop over the rows of a plan; see ``decode_loop.decode_loop``.

        Nothing else may use the COLD pool until it has been waited for.
        """
        ledger = self.cache.ledger
        ledger.kv, pool, self.batch, trace = decode_loop(
            self.params,
            ledger.kv,
            ledger.pools.cold,
            self.batch,
            plan.device,
            *self._ranks.whole((plan.choices.table, np.int32(n_steps), np.int32(max_finished))),
            step=self.model.step,
            n_rows=plan.n_rows,
            max_steps=self.config.decode_steps,
            backends=plan.choices.backends,
            page_size=self.cache.geometry.page_size,
            greedy=self.config.greedy,
            ranks=self._ranks,
        )
        return Decoding(plan, pool, trace)

    def compile_decode(self, plan: BatchPlan) -> None:
        """Compile the decode loop of a bucket by one without a step."""
        self.wait(self.decode(plan, n_steps=0, max_finished=plan.n_rows))

    def wait(self, decoding: Decoding) -> DecodeTrace:
        """Wait for a decode loop; what it did, on the host.

        Raises:
          KVGrainError: the COLD pool had too few pages for a step.
        """
        trace, n_free = jax.device_get((decoding.trace, decoding.pool.n_free))
        self.cache.decoded(decoding.pool, int(n_free))
        if trace.starved:
            raise KVGrainError("The COLD pool starved although every request had its pages.")
        return trace
