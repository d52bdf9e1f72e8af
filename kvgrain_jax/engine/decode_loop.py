"""The decode loop: many decode steps in one jitted program, no host transfer inside.

One step pops a COLD page for each row that needs one, runs all layers with the backend that was chosen
for so many rows, samples, and ends rows that are done. Pool, buffers and batch are donated and updated in place.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from kvgrain_jax.attention import DecodePlan, decode_attention, row_order
from kvgrain_jax.engine.batch import Batch, put_first
from kvgrain_jax.engine.ranks import Ranks
from kvgrain_jax.engine.sampling import greedy_sample, sample
from kvgrain_jax.pools import KVCache, buffers, cold
from kvgrain_jax.sharding import greedy_sharded, sample_sharded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeTrace:
    """What a call of the decode loop did, step by step; entries from ``n_steps`` on are unused.

    Arrays of the device, or of the host once they have been fetched.

    Attributes:
      tokens: token of each row in each step, -1 where the row was not active.
      pages: COLD page that each row took in each step, -1 where it took none.
      backend: index in ``backends`` of the backend each step took.
      rows: active rows of each step, which decided on the backend.
      n_steps: steps that ran.
      starved: the loop stopped because the COLD pool had too few free pages for the next step;
        nothing of that step was done.
    """

    tokens: Int[Array | np.ndarray, "steps B"]
    pages: Int[Array | np.ndarray, "steps B"]
    backend: Int[Array | np.ndarray, "steps"]
    rows: Int[Array | np.ndarray, "steps"]
    n_steps: Int[Array | np.ndarray, ""]
    starved: Bool[Array | np.ndarray, ""]


@partial(
    jax.jit,
    static_argnames=("step", "n_rows", "max_steps", "backends", "page_size", "greedy", "ranks"),
    donate_argnames=("kv", "pool", "batch"),
)
def decode_loop(
    params,
    kv: KVCache,
    pool: cold.ColdState,
    batch: Batch,
    plan: DecodePlan,
    choices: Int[Array, "choices"],
    n_steps: Int[Array, ""],
    max_finished: Int[Array, ""],
    *,
    step,
    n_rows: int,
    max_steps: int,
    backends: tuple[str, ...],
    page_size: int,
    greedy: bool = False,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> tuple[KVCache, cold.ColdState, Batch, DecodeTrace]:
    """Decode up to ``n_steps`` tokens of every active row.

    Args:
      params: weights of the model.
      kv: KV buffers; donated.
      pool: COLD pool; donated.
      batch: the batch; donated. Active rows lie in front, ordered as the plan says.
      plan: what the rows share.
      choices: ``[n_rows + 1]``, for each number of active rows the index in ``backends`` of the
        backend that a step takes, see ``attention.make_choices``.
      n_steps: steps to run, at most ``max_steps``.
      max_finished: stop after the step in which so many rows have finished.
      step: the model, see ``engine.model.Model.step``.
      n_rows: how many rows in front of the batch to compute (a bucket).
      max_steps: capacity of the trace.
      backends: those that a step can take; a branch of the program is compiled for each.
      page_size: tokens of a page.
      greedy: every row takes its most likely token, and the program has no branch for drawing one.
      ranks: the devices that run the loop together.

    Returns:
      ``(kv, pool, batch, trace)``. The loop ends after ``n_steps``, when no row is active, when
      ``max_finished`` rows have finished, or when the COLD pool starves.
    """
    loop = partial(
        _loop,
        step=step,
        n_rows=n_rows,
        max_steps=max_steps,
        backends=backends,
        page_size=page_size,
        greedy=greedy,
        axis=ranks.axis,
    )
    return ranks.run(
        loop, params, kv, pool, batch, plan, choices, n_steps, max_finished, n_results=3
    )


def _loop(
    params,
    kv: KVCache,
    pool: cold.ColdState,
    batch: Batch,
    plan: DecodePlan,
    choices,
    n_steps,
    max_finished,
    *,
    step,
    n_rows: int,
    max_steps: int,
    backends: tuple[str, ...],
    page_size: int,
    greedy: bool,
    axis: str | None,
) -> tuple[KVCache, cold.ColdState, Batch, DecodeTrace]:
    """``decode_loop`` on one rank."""
    head = jax.tree.map(lambda x: x[:n_rows], batch)
    n_steps = jnp.minimum(n_steps, max_steps)

    def choice_of(state):
        _, _, rows, _, _ = state
        return choices[jnp.sum(rows.active, dtype=jnp.int32)]

    def goes_on(state):
        _, pool, rows, trace, finished = state
        return (
            (trace.n_steps < n_steps)
            & jnp.any(rows.active)
            & _enough_pages(pool, rows, page_size)
            & (finished < max_finished)
        )

    def one_step(backend: int, state):
        kv, pool, rows, trace, finished = state
        pool, pages, taken = _take_pages(pool, rows, page_size)
        attend = _Attend(rows, pages, plan, backend=backends[backend], page_size=page_size)
        logits, kv = step(params, rows.tokens, rows.lengths, kv, attend)
        token = _next_token(logits, rows, greedy=greedy, axis=axis)
        trace = dataclasses.replace(
            trace,
            tokens=trace.tokens.at[trace.n_steps].set(jnp.where(rows.active, token, -1)),
            pages=trace.pages.at[trace.n_steps].set(taken),
            backend=trace.backend.at[trace.n_steps].set(backend),
            rows=trace.rows.at[trace.n_steps].set(jnp.sum(rows.active, dtype=jnp.int32)),
            n_steps=trace.n_steps + 1,
        )
        after = advance(rows, token, pages)
        finished += jnp.sum(rows.active & ~after.active, dtype=jnp.int32)
        return kv, pool, after, trace, finished

    def steps_with(backend: int, state):
        return lax.while_loop(
            lambda state: goes_on(state) & (choice_of(state) == backend),
            partial(one_step, backend),
            state,
        )

    # A loop for each backend inside one that changes between them: the host waits for the device at
    # every condition, and so it waits once a step, not twice.
    branches = [partial(steps_with, i) for i in range(len(backends))]
    trace = DecodeTrace(
        tokens=jnp.full((max_steps, n_rows), -1, jnp.int32),
        pages=jnp.full((max_steps, n_rows), -1, jnp.int32),
        backend=jnp.zeros(max_steps, jnp.int32),
        rows=jnp.zeros(max_steps, jnp.int32),
        n_steps=jnp.int32(0),
        starved=jnp.bool_(False),
    )
    kv, pool, head, trace, _ = lax.while_loop(
        goes_on,
        lambda state: lax.switch(choice_of(state), branches, state),
        (kv, pool, head, trace, jnp.int32(0)),
    )
    starved = jnp.any(head.active) & ~_enough_pages(pool, head, page_size)
    batch = put_first(batch, head)
    return kv, pool, batch, dataclasses.replace(trace, starved=starved)


def _next_token(logits, rows: Batch, *, greedy: bool, axis: str | None) -> Int[Array, "B"]:
    if greedy:
        return greedy_sample(logits) if axis is None else greedy_sharded(logits, axis=axis)
    parameters = (rows.temperature, rows.top_k, rows.top_p, rows.seed, rows.n_generated)
    return sample_sharded(sample, logits, *parameters, axis=axis)


def _needs_page(rows: Batch, page_size: int):
    """Rows whose next token is the first of a page."""
    return rows.active & (rows.lengths % page_size == 0)


def _enough_pages(pool: cold.ColdState, rows: Batch, page_size: int):
    return jnp.sum(_needs_page(rows, page_size), dtype=jnp.int32) <= pool.n_free


def _take_pages(pool: cold.ColdState, rows: Batch, page_size: int):
    """Pop a page for each row that needs one; the pool, the page tables with it, and the pages."""
    n_rows = rows.lengths.shape[0]
    need = _needs_page(rows, page_size)
    pool, new_pages, _ = cold.allocate(pool, need)
    row = jnp.where(need, jnp.arange(n_rows, dtype=jnp.int32), n_rows)
    tables = rows.pages.at[row, rows.lengths // page_size].set(new_pages, mode="drop")
    return pool, tables, jnp.where(need, new_pages, -1)


class _Attend:
    """What the model calls in each layer: append the new keys and values, then attend.

    Called with projections as they come (``projected``), it encodes positions too, in the kernel
    that appends.
    """

    def __init__(self, rows: Batch, pages, plan: DecodePlan, *, backend: str, page_size: int):
        row = jnp.arange(rows.lengths.shape[0], dtype=jnp.int32)
        page = pages.at[row, rows.lengths // page_size].get(mode="clip")
        self.place = page * page_size + rows.lengths % page_size
        self.active = rows.active
        lengths = jnp.where(rows.active, rows.lengths + 1, 0)
        self.attention = partial(
            decode_attention,
            plan=plan,
            pages=pages,
            lengths=lengths,
            backend=backend,
            page_size=page_size,
            order=row_order(plan, lengths, backend=backend),
        )

    def __call__(self, kv: KVCache, layer: int, q, k, v):
        kv = buffers.write(kv, layer, self._slots(kv), k, v)
        return self._attend(kv, layer, q), kv

    def projected(self, kv: KVCache, layer: int, qkv, cos, sin, norms=None, eps: float = 0.0):
        slots = self._slots(kv)
        kv, q = buffers.write_projected(kv, layer, slots, qkv, cos, sin, norms, eps)
        return self._attend(kv, layer, q), kv

    def _slots(self, kv: KVCache):
        return jnp.where(self.active, self.place, kv.k[0].shape[0])

    def _attend(self, kv: KVCache, layer: int, q):
        return self.attention(q, kv.k[layer], kv.v[layer], out_dtype=q.dtype).out


def advance(rows: Batch, token, pages) -> Batch:
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
