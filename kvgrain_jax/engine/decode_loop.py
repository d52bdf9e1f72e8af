"""The decode loop: many decode steps in one jitted program, no host transfer inside.

One step pops a COLD page for each row that needs one, chooses a backend, runs all layers, samples,
and ends rows that are done. Pool, buffers and batch are donated and updated in place.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from kvgrain_jax.attention import DecodePlan, DispatchRule, decode_attention
from kvgrain_jax.engine.batch import Batch
from kvgrain_jax.engine.sampling import sample
from kvgrain_jax.pools import KVCache, buffers, cold


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeTrace:
    """What a call of the decode loop did, step by step; entries from ``n_steps`` on are unused.

    Arrays of the device, or of the host once they have been fetched.

    Attributes:
      tokens: token of each row in each step, -1 where the row was not active.
      backend: index in ``rule.backends`` of the backend each step took.
      rows: active rows of each step; ``rows * G`` is what the ``meff`` rule compared to ``m_sat``.
      n_steps: steps that ran.
      starved: the loop stopped because the COLD pool had too few free pages for the next step;
        nothing of that step was done.
    """

    tokens: Int[Array | np.ndarray, "steps B"]
    backend: Int[Array | np.ndarray, "steps"]
    rows: Int[Array | np.ndarray, "steps"]
    n_steps: Int[Array | np.ndarray, ""]
    starved: Bool[Array | np.ndarray, ""]


@partial(
    jax.jit,
    static_argnames=("step", "n_rows", "max_steps", "rule", "page_size", "group"),
    donate_argnames=("kv", "pool", "batch"),
)
def decode_loop(
    params,
    kv: KVCache,
    pool: cold.ColdState,
    batch: Batch,
    plan: DecodePlan,
    n_steps: Int[Array, ""],
    return_on_finish: Bool[Array, ""],
    *,
    step,
    n_rows: int,
    max_steps: int,
    rule: DispatchRule,
    page_size: int,
    group: int,
) -> tuple[KVCache, cold.ColdState, Batch, DecodeTrace]:
    """Decode up to ``n_steps`` tokens of every active row.

    Args:
      params: weights of the model.
      kv: KV buffers; donated.
      pool: COLD pool; donated.
      batch: the batch; donated. Active rows lie in front, ordered as the plan says.
      plan: what the rows share.
      n_steps: steps to run, at most ``max_steps``.
      return_on_finish: stop after a step in which a row finished.
      step: the model, see ``engine.model.Model.step``.
      n_rows: how many rows in front of the batch to compute (a bucket).
      max_steps: capacity of the trace.
      rule: chooses the backend of each step.
      page_size: tokens of a page.
      group: ``G``, query heads of one KV head, for the dispatch rule.

    Returns:
      ``(kv, pool, batch, trace)``. The loop ends after ``n_steps``, when no row is active, when a
      row finished and ``return_on_finish`` is set, or when the COLD pool starves.
    """
    head = jax.tree.map(lambda x: x[:n_rows], batch)
    n_steps = jnp.minimum(n_steps, max_steps)

    def cond(state):
        _, pool, rows, trace, finished = state
        return (
            (trace.n_steps < n_steps)
            & jnp.any(rows.active)
            & _enough_pages(pool, rows, page_size)
            & ~(return_on_finish & finished)
        )

    def body(state):
        kv, pool, rows, trace, _ = state
        pool, pages = _take_pages(pool, rows, page_size)

        def run(backend, kv):
            attend = _attend(rows, pages, plan, backend=backend, page_size=page_size)
            return step(params, rows.tokens, rows.lengths, kv, attend)

        n_active = jnp.sum(rows.active, dtype=jnp.int32)
        choice = rule.choose(n_active, group, plan.n_segments)
        logits, kv = lax.switch(choice, [partial(run, name) for name in rule.backends], kv)
        token = sample(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.seed, rows.n_generated
        )
        trace = dataclasses.replace(
            trace,
            tokens=trace.tokens.at[trace.n_steps].set(jnp.where(rows.active, token, -1)),
            backend=trace.backend.at[trace.n_steps].set(choice),
            rows=trace.rows.at[trace.n_steps].set(n_active),
            n_steps=trace.n_steps + 1,
        )
        after = _advance(rows, token, pages)
        return kv, pool, after, trace, jnp.any(rows.active & ~after.active)

    trace = DecodeTrace(
        tokens=jnp.full((max_steps, n_rows), -1, jnp.int32),
        backend=jnp.zeros(max_steps, jnp.int32),
        rows=jnp.zeros(max_steps, jnp.int32),
        n_steps=jnp.int32(0),
        starved=jnp.bool_(False),
    )
    kv, pool, head, trace, _ = lax.while_loop(cond, body, (kv, pool, head, trace, jnp.bool_(False)))
    starved = jnp.any(head.active) & ~_enough_pages(pool, head, page_size)
    batch = jax.tree.map(lambda x, y: x.at[:n_rows].set(y), batch, head)
    return kv, pool, batch, dataclasses.replace(trace, starved=starved)


def _needs_page(rows: Batch, page_size: int):
    """Rows whose next token is the first of a page."""
    return rows.active & (rows.lengths % page_size == 0)


def _enough_pages(pool: cold.ColdState, rows: Batch, page_size: int):
    return jnp.sum(_needs_page(rows, page_size), dtype=jnp.int32) <= pool.n_free


def _take_pages(pool: cold.ColdState, rows: Batch, page_size: int):
    """Pop a page for each row that needs one; the pool and the page tables with it."""
    n_rows = rows.lengths.shape[0]
    need = _needs_page(rows, page_size)
    pool, new_pages, _ = cold.allocate(pool, need)
    row = jnp.where(need, jnp.arange(n_rows, dtype=jnp.int32), n_rows)
    return pool, rows.pages.at[row, rows.lengths // page_size].set(new_pages, mode="drop")


def _attend(rows: Batch, pages, plan: DecodePlan, *, backend: str, page_size: int):
    """What the model calls in each layer: append the new keys and values, then attend."""
    row = jnp.arange(rows.lengths.shape[0], dtype=jnp.int32)
    page = pages.at[row, rows.lengths // page_size].get(mode="clip")
    place = page * page_size + rows.lengths % page_size

    def attend(kv: KVCache, layer: int, q, k, v):
        slots = jnp.where(rows.active, place, kv.k[layer].shape[0])
        kv = buffers.write(kv, layer, slots, k, v)
        attention = decode_attention(
            q,
            kv.k[layer],
            kv.v[layer],
            plan,
            pages,
            jnp.where(rows.active, rows.lengths + 1, 0),
            backend=backend,
            page_size=page_size,
        )
        return attention.out.astype(q.dtype), kv

    return attend


def _advance(rows: Batch, token, pages) -> Batch:
    """The rows after a step in which each active one drew ``token``."""
    ended = (rows.remaining <= 1) | jnp.any(token[:, None] == rows.stop_tokens, axis=1)
    one = rows.active.astype(jnp.int32)
    return dataclasses.replace(
        rows,
        tokens=jnp.where(rows.active, token, rows.tokens),
        lengths=rows.lengths + one,
        pages=pages,
        active=rows.active & ~ended,
        remaining=rows.remaining - one,
        n_generated=rows.n_generated + one,
    )
