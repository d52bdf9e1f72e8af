"""Prefill with compression inside: one chunk of one prompt in, its survivors in the pool.

In each layer the tokens of the chunk attend to the survivors of earlier chunks and to each other,
all of them; then each head keeps its best and the rest is never written. Nothing is allocated that
would have to be taken back. Source: Tangram §4.1.2.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvgrain_jax.budgets import compress, pool
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.groups import HeadGroups
from kvgrain_jax.budgets.pool import HeadKV
from kvgrain_jax.budgets.shared import HeadRuns
from kvgrain_jax.engine.batch import Batch
from kvgrain_jax.engine.sampling import sample
from pallas_kernels import online_softmax

KV_TILE = 512

# Places in each head's list of tokens, ``[K, S]``, to the single-head rows that hold them.
type RowsOf = Callable[[Int[Array, "K S"]], Int[Array, "K S"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """Tokens of one request, in the order of their positions.

    Attributes:
      tokens: token ids; padding at the end.
      first: position of the first token.
      n_tokens: how many count, at least 1.
      keep_before: tokens at positions below are kept in any case (sinks, what is locked).
      window: last tokens so far that are kept in any case.
    """

    tokens: Int[Array, "C"]
    first: Int[Array, ""]
    n_tokens: Int[Array, ""]
    keep_before: Int[Array, ""]
    window: Int[Array, ""]


@partial(
    jax.jit,
    static_argnames=("step", "groups", "scorer", "page_size", "selects", "shrinks", "max_context"),
    donate_argnames=("kv",),
)
def prefill_chunk(
    params,
    kv: HeadKV,
    table: Int[Array, "n_groups T"],
    lengths: Int[Array, "n_groups G_h"],
    targets: Int[Array, "n_groups G_h"],
    chunk: PromptChunk,
    row: Batch,
    prefix: HeadRuns | None = None,
    *,
    step,
    groups: HeadGroups,
    scorer: ChunkScorer,
    page_size: int,
    selects: bool,
    shrinks: bool,
    max_context: int,
) -> tuple[HeadKV, Int[Array, "1"], Bool[Array, ""]]:
    """Compute one chunk of one request and keep the best tokens of each head.

    Args:
      params: weights of the model.
      kv: the pool; donated.
      table: page table of each group.
      lengths: tokens of each head before the chunk.
      targets: tokens of each head after it; at most ``lengths`` and the chunk together.
      chunk: the tokens.
      row: the request's sampling parameters, a batch of one.
      prefix: survivors of the shared prefix in front of the request; None where no request may
        share one.
      step: the model, see ``engine.model.Model.step``.
      groups: the head groups.
      scorer: scores of the tokens.
      page_size: rows of a page.
      selects: False where every head keeps everything: nothing is scored by queries then.
      shrinks: a target may lie below its length.
      max_context: above every position.

    Returns:
      ``(kv, token, finite)``: the token drawn behind the chunk's last one, which counts if the
      prompt ends there, and whether all scores were numbers. Where they were not, what the
      request holds is worthless.
    """
    n_tokens = chunk.tokens.shape[0]
    index = jnp.arange(n_tokens, dtype=jnp.int32)
    positions = jnp.where(index < chunk.n_tokens, chunk.first + index, -1)
    end = chunk.first + chunk.n_tokens
    n_places = table.shape[1] * page_size

    def attend(state, layer, q, k, v):
        kv, finite = state
        group, place = groups.group_of[layer], groups.place_of[layer]
        before, target = lengths[group, place], targets[group, place]

        def rows(tokens):
            return pool.rows_of(
                table[group],
                jnp.asarray(place),
                tokens,
                page_size=page_size,
                group_size=groups.group_size,
            )

        earlier = [(rows, before)]
        if prefix is not None:
            starts = prefix.starts[layer][:, None]
            earlier += [(lambda tokens: starts + tokens, prefix.lengths[layer])]
        out = attend_chunk(q, k, v, kv, earlier, chunk.n_tokens)
        # The survivors are written over only when they have been read: else XLA copies the pool.
        out, kv = lax.optimization_barrier((out, kv))
        new_scores = scorer.on_arrival(layer, k, positions)
        token = jnp.arange(n_places, dtype=jnp.int32)[None, :]
        places = rows(jnp.broadcast_to(token, (len(group), n_places)))
        live = token < before[:, None]
        kept_old, kept_new = live, jnp.broadcast_to((positions >= 0)[None, :], new_scores.shape)
        if selects:
            scores, at = candidates(q, k, v, kv, places, live, new_scores)
            finite &= ~jnp.any(jnp.isnan(scores) & (at >= 0))
            protected = compress.protected_scores(
                scores, at, before=chunk.keep_before, after=end - chunk.window
            )
            kept = compress.keep_best(protected, at, target)
            kept_old, kept_new = kept[:, :n_places], kept[:, n_places:]
            if scorer.by_queries:
                new_scores = scores[:, n_places:]
                kv = pool.write_scores(kv, places, live, scores[:, :n_places])
        if shrinks:
            kv, kept_old = compress.compact(kv, places, kept_old)
        kv = compress.add_tokens(kv, places, kept_old, kept_new, k, v, new_scores, positions)
        return out.astype(q.dtype), (kv, finite)

    def candidates(q, k, v, kv, places, live, new_scores):
        """Scores and positions of the survivors and the chunk's tokens, ``[K, S + C]`` each."""
        old_scores, old_positions = pool.read_notes(kv, places)
        new_positions = jnp.broadcast_to(positions[None, :], new_scores.shape)
        at = jnp.concatenate([jnp.where(live, old_positions, -1), new_positions], axis=1)
        if not scorer.by_queries:
            return jnp.concatenate([old_scores, new_scores], axis=1), at
        old_k, old_v = pool.read_vectors(kv, places)
        keys = jnp.concatenate([old_k, k.swapaxes(0, 1).astype(old_k.dtype)], axis=1)
        values = jnp.concatenate([old_v, v.swapaxes(0, 1).astype(old_v.dtype)], axis=1)
        return scorer.by_last_queries(q, positions, keys, values, at, max_context=max_context), at

    logits, (kv, finite) = step(
        params,
        chunk.tokens,
        jnp.maximum(positions, 0),
        (kv, jnp.bool_(True)),
        attend,
        rows=chunk.n_tokens[None] - 1,
    )
    token = sample(logits, row.temperature, row.top_k, row.top_p, row.seed, row.n_generated)
    return kv, token, finite


def attend_chunk(
    q: Float[Array, "C H D"],
    k: Float[Array, "C K D"],
    v: Float[Array, "C K D"],
    kv: HeadKV,
    earlier: Sequence[tuple[RowsOf, Int[Array, "K"]]],
    n_tokens: Int[Array, ""],
) -> Float[Array, "C H D"]:
    """Attention of a chunk's tokens to each head's survivors and, causally, to the chunk itself.

    Every survivor lies in front of the chunk, so only the chunk itself needs the causal mask.

    Args:
      q: queries.
      k: keys of the chunk.
      v: values of the chunk.
      kv: the pool.
      earlier: lists of survivors of each head: single-head rows of places in it, and its length.
      n_tokens: tokens of the chunk that count.

    Returns:
      The output, float32; anything finite behind ``n_tokens``.
    """
    n_queries, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    scale = head_dim**-0.5
    grouped = q.reshape(n_queries, n_kv_heads, -1, head_dim)
    index = jnp.arange(n_queries, dtype=jnp.int32)

    def take_in(state, keys, values, mask):
        """One tile: keys and values ``[K, S, D]``, mask ``[K or 1, C or 1, S]``."""
        scores = jnp.einsum("ckgd,ksd->kgcs", grouped, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)

        def weigh(weights):
            weights = weights.astype(values.dtype)
            return jnp.einsum("kgcs,ksd->kgcd", weights, values, preferred_element_type=jnp.float32)

        return online_softmax.update(state, scores, weigh)

    def survivors(rows, lengths, i, state):
        token = i * KV_TILE + jnp.arange(KV_TILE, dtype=jnp.int32)[None, :]
        mask = token < lengths[:, None]
        keys, values = pool.read_vectors(kv, rows(jnp.broadcast_to(token, mask.shape)))
        values = jnp.where(mask[..., None], values, 0)  # 0 × NaN of an unused slot is NaN
        return take_in(state, keys.astype(q.dtype), values.astype(q.dtype), mask[:, None, :])

    tile = min(KV_TILE, n_queries)

    def chunk(i, state):
        start = jnp.minimum(i * tile, n_queries - tile)
        token = start + jnp.arange(tile, dtype=jnp.int32)
        counts = (token >= i * tile) & (token < n_tokens)
        mask = (counts[None, :] & (token[None, :] <= index[:, None]))[None]
        keys, values = (lax.dynamic_slice_in_dim(x, start, tile).swapaxes(0, 1) for x in (k, v))
        return take_in(state, keys, values, mask)

    state = online_softmax.initial((n_kv_heads, n_heads // n_kv_heads, n_queries), head_dim)
    for rows, lengths in earlier:
        n_tiles = (jnp.max(lengths) + KV_TILE - 1) // KV_TILE
        state = lax.fori_loop(0, n_tiles, partial(survivors, rows, lengths), state)
    state = lax.fori_loop(0, -(-n_queries // tile), chunk, state)
    out, _ = online_softmax.finish(state)
    return out.transpose(2, 0, 1, 3).reshape(q.shape)
