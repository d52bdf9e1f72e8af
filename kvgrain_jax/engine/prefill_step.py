"""One prefill call: a packed chunk of prompt tokens in, the first token of finished prompts out."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvgrain_jax.attention import PrefillPlan, prefill_attention
from kvgrain_jax.engine.batch import Batch, put_tokens
from kvgrain_jax.engine.ranks import Ranks
from kvgrain_jax.engine.sampling import sample
from kvgrain_jax.pools import KVCache, buffers
from kvgrain_jax.sharding import sample_sharded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """Prompt tokens of several requests, packed one behind the other.

    Attributes:
      tokens: token ids; padding at the end.
      positions: position of each token in its request; -1 for padding, which then sees no key.
      rows: batch row of each token; ``B`` for padding.
      last: index in the chunk of the last prompt token of each request that the chunk completes.
      last_rows: batch row of each of them; ``B`` for padding.
      lengths: prompt length of each of them.
      plan: what the tokens attend to.
    """

    tokens: Int[Array, "T"]
    positions: Int[Array, "T"]
    rows: Int[Array, "T"]
    last: Int[Array, "R"]
    last_rows: Int[Array, "R"]
    lengths: Int[Array, "R"]
    plan: PrefillPlan


@partial(jax.jit, static_argnames=("step", "page_size", "ranks"), donate_argnames=("kv", "batch"))
def prefill_step(
    params,
    kv: KVCache,
    batch: Batch,
    chunk: Chunk,
    *,
    step,
    page_size: int,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> tuple[KVCache, Batch, Int[Array, "R"]]:
    """Compute one chunk; requests it completes get their first token and become active.

    Args:
      params: weights of the model.
      kv: KV buffers; donated.
      batch: the batch, whose rows hold the page tables; donated.
      chunk: the tokens.
      step: the model, see ``engine.model.Model.step``.
      page_size: tokens of a page.
      ranks: the devices that compute the chunk together.

    Returns:
      ``(kv, batch, tokens)``: the first token of each completed request, as ``chunk.last_rows``.
    """
    program = partial(_prefill, step=step, page_size=page_size, axis=ranks.axis)
    return ranks.run(program, params, kv, batch, chunk, n_results=2)


def _prefill(
    params, kv: KVCache, batch: Batch, chunk: Chunk, *, step, page_size: int, axis: str | None
) -> tuple[KVCache, Batch, Int[Array, "R"]]:
    """``prefill_step`` on one rank."""
    n_slots = kv.k[0].shape[0]
    page = batch.pages.at[chunk.rows, chunk.positions // page_size].get(mode="clip")
    slots = page * page_size + chunk.positions % page_size
    slots = jnp.where(chunk.positions >= 0, slots, n_slots)

    def attend(kv, layer, q, k, v):
        attention = prefill_attention(
            q,
            k,
            v,
            kv.k[layer],
            kv.v[layer],
            chunk.plan,
            batch.pages,
            page_size=page_size,
            out_dtype=q.dtype,
        )
        return attention.out, buffers.write(kv, layer, slots, k, v)

    positions = jnp.maximum(chunk.positions, 0)
    logits, kv = step(params, chunk.tokens, positions, kv, attend, rows=chunk.last)

    def of_row(x):
        return x.at[chunk.last_rows].get(mode="clip")

    tokens = sample_sharded(
        sample,
        logits,
        of_row(batch.temperature),
        of_row(batch.top_k),
        of_row(batch.top_p),
        of_row(batch.seed),
        jnp.zeros_like(chunk.last),
        axis=axis,
    )
    return kv, put_tokens(batch, chunk.last_rows, tokens, chunk.lengths), tokens
