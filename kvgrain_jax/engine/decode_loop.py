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
    n_slots = kv.k[0].shape[0]

    def needs_page(rows: Batch):
        return rows.active & (rows.lengths % page_size == 0)

    def enough_pages(pool, rows):
        return jnp.sum(needs_page(rows), dtype=jnp.int32) <= pool.n_free

    def cond(state):
        _, pool, rows, trace, finished = state
        return (
            (trace.n_steps < n_steps)
            & jnp.any(rows.active)
            & enough_pages(pool, rows)
            & ~(return_on_finish & finished)
        )

    def body(state):
        kv, pool, rows, trace, _ = state
        need = needs_page(rows)
        pool, new_pages, _ = cold.allocate(pool, need)
        row = jnp.arange(n_rows, dtype=jnp.int32)
        page = rows.lengths // page_size
        pages = rows.pages.at[jnp.where(need, row, n_rows), page].set(new_pages, mode="drop")
        slots = pages.at[row, page].get(mode="clip") * page_size + rows.lengths % page_size
        slots = jnp.where(rows.active, slots, n_slots)
        lengths = jnp.where(rows.active, rows.lengths + 1, 0)

        def run(backend, kv):
            def attend(kv, layer, q, k, v):
                kv = buffers.write(kv, layer, slots, k, v)
                attention = decode_attention(
                    q,
                    kv.k[layer],
                    kv.v[layer],
                    plan,
                    pages,
                    lengths,
                    backend=backend,
                    page_size=page_size,
                )
                return attention.out.astype(q.dtype), kv

            return step(params, rows.tokens, rows.lengths, kv, attend)

        n_active = jnp.sum(rows.active, dtype=jnp.int32)
        choice = rule.choose(n_active, group, plan.n_segments)
        logits, kv = lax.switch(choice, [partial(run, name) for name in rule.backends], kv)
        token = sample(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.seed, rows.n_generated
        )
        ended = (rows.remaining <= 1) | jnp.any(token[:, None] == rows.stop_tokens, axis=1)
        finished = rows.active & ended
        one = rows.active.astype(jnp.int32)
        trace = DecodeTrace(
            tokens=trace.tokens.at[trace.n_steps].set(jnp.where(rows.active, token, -1)),
            backend=trace.backend.at[trace.n_steps].set(choice),
            rows=trace.rows.at[trace.n_steps].set(n_active),
            n_steps=trace.n_steps + 1,
            starved=trace.starved,
        )
        rows = dataclasses.replace(
            rows,
            tokens=jnp.where(rows.active, token, rows.tokens),
            lengths=rows.lengths + one,
            pages=pages,
            active=rows.active & ~ended,
            remaining=rows.remaining - one,
            n_generated=rows.n_generated + one,
        )
        return kv, pool, rows, trace, jnp.any(finished)

    trace = DecodeTrace(
        tokens=jnp.full((max_steps, n_rows), -1, jnp.int32),
        backend=jnp.zeros(max_steps, jnp.int32),
        rows=jnp.zeros(max_steps, jnp.int32),
        n_steps=jnp.int32(0),
        starved=jnp.bool_(False),
    )
    n_steps = jnp.minimum(n_steps, max_steps)
    kv, pool, head, trace, _ = lax.while_loop(cond, body, (kv, pool, head, trace, jnp.bool_(False)))
    starved = jnp.any(head.active) & ~enough_pages(pool, head)
    batch = jax.tree.map(lambda x, y: x.at[:n_rows].set(y), batch, head)
    return kv, pool, batch, dataclasses.replace(trace, starved=starved)
