"""Compress and reclaim: the dynamic baseline that deterministic budgets make unnecessary.

A request is admitted with pages for its whole prompt, which is computed without dropping anything.
Then all heads of all layers compete for the places that the retention leaves, each head's tokens
are moved together, and the pages that are empty now are looked up and given back, while the
scheduler waits to hear how many they are. Source: Tangram §3.1.2, Figure 11.
"""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvgrain_jax.budgets import compress, pool
from kvgrain_jax.budgets.admission import Holding, Sequence
from kvgrain_jax.budgets.budget import BudgetPlan
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.budgets.groups import HeadGroups, group_pages
from kvgrain_jax.budgets.pool import HeadKV
from kvgrain_jax.budgets.turns import SpanPlan
from kvgrain_jax.errors import ConfigError, KVGrainError


@dataclasses.dataclass
class ReclaimTimes:
    """Seconds that compression after prefill took, all requests together.

    Attributes:
      eviction: choosing tokens and moving them together.
      reclaim: learning the new lengths, giving the empty pages back, shortening the tables.
      pages: pages that were given back.
    """

    eviction: float = 0.0
    reclaim: float = 0.0
    pages: int = 0


@dataclasses.dataclass(eq=False)
class _Dynamic(Sequence):
    """A request whose ``plan`` keeps everything while it is computed.

    Attributes:
      target: the plan whose total all heads share afterwards.
    """

    target: BudgetPlan | None = None


class DynamicEngine(HeadEngine):
    """The engine with budgets that each prompt decides on its own, after it was computed.

    Args:
      model: the language model.
      plan: its retention is what all heads together keep; how it shares that out is not used.
      groups: which heads share a page table.
      config: as for ``HeadEngine``; conversations and pauses are not served.

    Attributes:
      times: what compressing and reclaiming took.
      kept: tokens that each head kept, ``[L, K]``, by request.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.times = ReclaimTimes()
        self.kept: dict[str, Int[np.ndarray, "L K"]] = {}

    def _sequence(self, request, conversation: str | None, retention: float | None) -> Sequence:
        if conversation is not None:
            raise ConfigError("The dynamic baseline serves single requests, not conversations.")
        sequence = super()._sequence(request, conversation, retention)
        whole = dataclasses.replace(sequence.plan, retention=1.0)
        return _Dynamic(request, whole, sequence.prompt, target=sequence.plan)

    def preempt(self, request_id: str) -> None:
        """Refused: what a request keeps depends on when it is compressed.

        Raises:
          KVGrainError: always.
        """
        raise KVGrainError("The dynamic baseline cannot compute a request again the same way.")

    def _selects(self, plan: SpanPlan, done: int) -> bool:
        # Nothing is dropped, but the last queries judge all tokens that are there.
        return self.config.scorer.by_queries and done == plan.n_tokens

    def _after_context(self, row: Sequence) -> None:
        assert isinstance(row, _Dynamic)
        assert row.holding is not None
        assert row.target is not None
        target, last, n = row.target, row.plans[-1], row.n_context
        jax.block_until_ready(self.ledger.kv.k)
        start = time.perf_counter()
        self.ledger.kv, kept = evict(
            self.ledger.kv,
            row.holding.table,
            self.device.by_group(last.after),
            jnp.int32(n),
            jnp.int32(target.total(n)),
            groups=self.groups,
            page_size=self.config.page_size,
            sinks=target.sinks,
            window=target.window,
        )
        jax.block_until_ready(kept)
        evicted = time.perf_counter()
        self._reclaim(row, np.asarray(kept))
        self.times.eviction += evicted - start
        self.times.reclaim += time.perf_counter() - evicted

    def _reclaim(self, row: Sequence, kept: Int[np.ndarray, "n_groups G_h"]) -> None:
        """Give back the pages that hold no token any more."""
        holding = row.holding
        assert holding is not None
        layers, heads = self.groups.members[..., 0], self.groups.members[..., 1]
        held = np.zeros((self.groups.n_layers, self.groups.n_kv_heads), np.int64)
        held[layers, heads] = kept
        pages = group_pages(self.groups, held + row.growth, self.config.page_size)
        column = jnp.arange(holding.table.shape[1], dtype=jnp.int32)[None, :]
        empty = column >= jnp.asarray(pages, jnp.int32)[:, None]
        n_empty = holding.n_pages - int(pages.sum())
        self.ledger.release(jnp.where(empty, holding.table, -1), n_empty)
        self.times.pages += n_empty
        row.holding = Holding(jnp.where(empty, -1, holding.table), pages)
        row.plans[-1] = dataclasses.replace(row.plans[-1], after=held)
        self.kept[row.request.id] = held


@partial(
    jax.jit,
    static_argnames=("groups", "page_size", "sinks", "window"),
    donate_argnames=("kv",),
)
def evict(
    kv: HeadKV,
    table: Int[Array, "n_groups T"],
    lengths: Int[Array, "n_groups G_h"],
    n_tokens: Int[Array, ""],
    total: Int[Array, ""],
    *,
    groups: HeadGroups,
    page_size: int,
    sinks: int,
    window: int,
) -> tuple[HeadKV, Int[Array, "n_groups G_h"]]:
    """Keep the best ``total`` tokens of all heads of a request, moved to the front of each.

    Args:
      kv: the pool; donated.
      table: page table of each group.
      lengths: tokens that each member holds.
      n_tokens: tokens of the context.
      total: tokens that all heads keep together; sinks and window of every head are among them.
      groups: the head groups.
      page_size: rows of a page.
      sinks: tokens at the front that every head keeps.
      window: tokens at the end that every head keeps.

    Returns:
      ``(kv, kept)``: the pool, and the tokens that each member holds now.
    """
    n_groups, group_size = lengths.shape
    n_places = table.shape[1] * page_size
    place = jnp.arange(n_places, dtype=jnp.int32)

    def places_of(table: Int[Array, "T"]) -> Int[Array, "G_h S"]:
        return pool.rows_of(
            jnp.broadcast_to(table[None, :], (group_size, table.shape[0])),
            jnp.arange(group_size, dtype=jnp.int32),
            jnp.broadcast_to(place[None, :], (group_size, n_places)),
            page_size=page_size,
            group_size=group_size,
        )

    scores, positions = pool.read_notes(kv, jax.vmap(places_of)(table))
    live = place[None, None, :] < lengths[..., None]
    kept = _best_of_all_heads(
        jnp.where(live, positions, -1), scores, groups, n_tokens, total, sinks, window
    )

    def compact_group(group, kv):
        return compress.compact(kv, places_of(table[group]), kept[group])[0]

    kv = lax.fori_loop(0, n_groups, compact_group, kv)
    return kv, jnp.sum(kept, axis=2, dtype=jnp.int32)


def _best_of_all_heads(
    positions: Int[Array, "n_groups G_h S"],
    scores: Float[Array, "n_groups G_h S"],
    groups: HeadGroups,
    n_tokens: Int[Array, ""],
    total: Int[Array, ""],
    sinks: int,
    window: int,
) -> Bool[Array, "n_groups G_h S"]:
    """The best ``total`` of all heads together; ties by layer, head, position."""
    head = groups.members[..., 0] * groups.n_kv_heads + groups.members[..., 1]
    place = jnp.asarray(head, jnp.int32)[..., None] * positions.shape[2] + positions
    flat = jnp.where(positions >= 0, place, -1).reshape(1, -1)
    protected = compress.protected_scores(
        scores.reshape(1, -1),
        positions.reshape(1, -1),
        before=jnp.int32(sinks),
        after=n_tokens - window,
    )
    return compress.keep_best(protected, flat, total[None]).reshape(positions.shape)
