"""The device side of the engine over head groups: pool and batch, and the programs that change them.

What a request is and where it stands enters, on the host; tokens leave.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvgrain_jax.budgets import decode, ragged
from kvgrain_jax.budgets.admission import Sequence
from kvgrain_jax.budgets.budget import BudgetPlan
from kvgrain_jax.budgets.engine_config import HeadEngineConfig
from kvgrain_jax.budgets.gates import Gate
from kvgrain_jax.budgets.groups import HeadGroups
from kvgrain_jax.budgets.ledger import HeadLedger
from kvgrain_jax.budgets.prefill import PromptChunk, prefill_chunk
from kvgrain_jax.budgets.shared import (
    SharedPrefix,
    SharedRows,
    runs_of,
    share_rows,
    store_prefix,
)
from kvgrain_jax.engine import batch as batches
from kvgrain_jax.engine.model import Model
from pallas_kernels.head_group_decode import DecodeWork


class HeadDevice:
    """Pool and batch of one engine.

    Args:
      model: the language model.
      plan: budgets that the split table is made for.
      groups: the head groups.
      config: sizes and options.
      max_context: tokens of one request.
      gates: weights of the scorer ``gates``.

    Attributes:
      ledger: the pool.
      batch: the rows that decode.
    """

    def __init__(
        self,
        model: Model,
        plan: BudgetPlan,
        groups: HeadGroups,
        config: HeadEngineConfig,
        max_context: int,
        gates: Gate | None = None,
    ):
        self._gates = gates
        self.model, self.groups, self.config = model, groups, config
        self.max_context = max_context
        width = -(-max_context // config.page_size)
        geometry = config.geometry(model, groups)
        self.ledger = HeadLedger(geometry, n_groups=groups.n_groups, width=width)
        self.batch = decode.init(config.max_batch, width, groups)
        self._shares = geometry.n_hot_pages > 0
        self._shared: tuple[list[SharedPrefix | None], SharedRows] | None = None
        self._kernels = ragged.head_kernels(model.n_heads, model.n_kv_heads, model.head_dim)
        self._layers = tuple(jnp.int32(layer) for layer in range(model.n_layers))
        self._works = {n: self._decode_works(plan, n) for n in config.batch_buckets}

    def compute_chunk(
        self, row: Sequence, *, selects: bool
    ) -> tuple[Int[Array, "1"], Bool[Array, ""]]:
        """Compute the next chunk of a request's context; see ``prefill.prefill_chunk``."""
        assert row.holding is not None
        span, plan = row.spans[row.span], row.plans[row.span]
        n = self.chunk_size(row)
        tokens = np.zeros(next(s for s in self.config.chunk_buckets if s >= n), np.int32)
        tokens[:n] = span.tokens[row.done : row.done + n]
        floors = self.config.floors
        return self._prefill(
            row.holding.table,
            self.by_group(plan.held(row.done, floors)),
            self.by_group(plan.held(row.done + n, floors)),
            PromptChunk(
                tokens=jnp.asarray(tokens),
                first=jnp.int32(plan.first + row.done),
                n_tokens=jnp.int32(n),
                keep_before=jnp.int32(plan.keep_before),
                window=jnp.int32(plan.window),
            ),
            self._row_of(row),
            row.prefix,
            selects=selects,
            shrinks=plan.shrinks,
        )

    def compile_chunk(self, size: int, selects: bool, shrinks: bool) -> None:
        """Compile the program of a chunk by one without a token."""
        nothing = jnp.int32(0)
        none_held = jnp.zeros((self.groups.n_groups, self.groups.group_size), jnp.int32)
        self._prefill(
            jnp.full((self.groups.n_groups, self.batch.tables.shape[-1]), -1, jnp.int32),
            none_held,
            none_held,
            PromptChunk(jnp.zeros(size, jnp.int32), nothing, nothing, nothing, nothing),
            batches.init(1, 1),
            None,
            selects=selects,
            shrinks=shrinks,
        )

    def _prefill(
        self,
        table: Int[Array, "n_groups T"],
        lengths: Int[Array, "n_groups G_h"],
        targets: Int[Array, "n_groups G_h"],
        chunk: PromptChunk,
        row: batches.Batch,
        prefix: SharedPrefix | None,
        **flags: bool,
    ) -> tuple[Int[Array, "1"], Bool[Array, ""]]:
        self.ledger.kv, token, finite = prefill_chunk(
            self.model.params,
            self.ledger.kv,
            table,
            lengths,
            targets,
            chunk,
            row,
            self._runs(prefix) if self._shares else None,
            self._layers,
            self._gates,
            step=self.model.step,
            groups=self.groups,
            scorer=self.config.scorer,
            page_size=self.config.page_size,
            greedy=self.config.greedy,
            kernels=self._kernels,
            max_context=self.max_context,
            **flags,
        )
        return token, finite

    def chunk_size(self, row: Sequence) -> int:
        """Tokens of the next chunk of a request: no chunk lies across two spans."""
        return min(self.config.chunk_tokens, row.plans[row.span].n_tokens - row.done)

    def activate(self, index: int, row: Sequence) -> None:
        """A row whose context is computed decodes from now on."""
        assert row.holding is not None
        state = dataclasses.replace(
            self._row_of(row),
            tokens=jnp.asarray(row.tokens[-1:], jnp.int32),
            lengths=jnp.asarray([row.n_context], jnp.int32),
            active=jnp.ones(1, bool),
            remaining=jnp.asarray([row.request.max_new_tokens - len(row.tokens)], jnp.int32),
            n_generated=jnp.asarray([len(row.tokens)], jnp.int32),
        )
        lengths = self.by_group(row.plans[-1].after)
        new = decode.HeadBatch(state, row.holding.table[None], lengths[None])
        self.batch = decode.set_row(self.batch, jnp.int32(index), new)

    def deactivate(self, index: int) -> None:
        """A row decodes no more."""
        self.batch = decode.deactivate(self.batch, jnp.int32(index))

    def decode(
        self, rows: list[Sequence | None], *, n_rows: int, n_steps: int, max_finished: int
    ) -> Int[np.ndarray, "steps n_rows"]:
        """Tokens of the next steps, -1 where a row was not active; see ``decode.decode_loop``."""
        self.ledger.kv, self.batch, trace = decode.decode_loop(
            self.model.params,
            self.ledger.kv,
            self.batch,
            jnp.int32(n_steps),
            jnp.int32(max_finished),
            self._works[n_rows],
            self._share_rows(rows[:n_rows]) if self._shares else None,
            self._layers,
            self._gates,
            step=self.model.step,
            n_rows=n_rows,
            max_steps=self.config.decode_steps,
            groups=self.groups,
            scorer=self.config.scorer,
            page_size=self.config.page_size,
            greedy=self.config.greedy,
        )
        return np.asarray(trace.tokens)[: int(trace.n_steps)]

    def store_prefix(self, row: Sequence, prefix: SharedPrefix) -> None:
        """Copy what a request holds into the slab of the prefix that it computed."""
        assert row.holding is not None
        self.ledger.kv = store_prefix(
            self.ledger.kv,
            row.holding.table,
            self.by_group(prefix.lengths),
            self.by_group(prefix.starts),
            page_size=self.config.page_size,
        )
        prefix.ready = True

    def by_group(self, values: Int[np.ndarray, "L K"]) -> Int[Array, "n_groups G_h"]:
        """Numbers of the heads in the order of the groups, on the device."""
        return jnp.asarray(self.groups.by_group(values), jnp.int32)

    def _decode_works(self, plan: BudgetPlan, n_rows: int) -> list[DecodeWork] | None:
        n_blocks = self.config.row_blocks(n_rows, self._kernels)
        if n_blocks == 0:
            return None
        return decode.layer_works(
            self.groups,
            self.config.splits(plan, self.max_context, n_blocks),
            n_blocks=n_blocks,
            n_rows=n_rows,
            n_heads=self.model.n_heads,
        )

    def _runs(self, prefix: SharedPrefix | None):
        return runs_of(prefix, self.model.n_layers, self.model.n_kv_heads)

    def _share_rows(self, rows: list[Sequence | None]) -> SharedRows:
        """The shared part of the batch, made anew only when its rows have changed."""
        prefixes = [row.prefix if row and row.decoding else None for row in rows]
        if self._shared is None or self._shared[0] != prefixes:
            plan = share_rows(
                prefixes,
                n_layers=self.model.n_layers,
                n_kv_heads=self.model.n_kv_heads,
                n_rows_of_slabs=self.ledger.geometry.n_hot_rows,
                n_rows_of_pool=self.ledger.geometry.n_rows,
                kernels=self._kernels,
            )
            self._shared = prefixes, plan
        return self._shared[1]

    def _row_of(self, row: Sequence) -> batches.Batch:
        """Sampling parameters of a request, a batch of one."""
        entry = (0, row.request, np.zeros(0, np.int32))
        return batches.rows_of([entry], n_rows=1, n_pages=1, capacity=1)[1]
