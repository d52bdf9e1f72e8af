"""Prefill with compression inside: one chunk of one prompt in, its survivors in the pool.

In each layer the tokens of the chunk attend to the survivors of earlier chunks and to each other,
all of them; then each head keeps its best and the rest is never written. Nothing is allocated that
would have to be taken back. Source: Tangram §4.1.2.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from kvgrain_jax.attention.plan import KernelShape
from kvgrain_jax.budgets import compress, pool, ragged
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.gates import Gate
from kvgrain_jax.budgets.groups import HeadGroups
from kvgrain_jax.budgets.pool import HeadKV
from kvgrain_jax.budgets.ragged import of_layer
from kvgrain_jax.budgets.shared import HeadRuns
from kvgrain_jax.engine.batch import Batch
from kvgrain_jax.engine.model import HiddenAttend
from kvgrain_jax.engine.sampling import greedy_sample, sample
from pallas_kernels import merge_row_partials


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
    static_argnames=(
        "step",
        "groups",
        "scorer",
        "page_size",
        "selects",
        "shrinks",
        "greedy",
        "kernels",
        "max_context",
    ),
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
    layers: Sequence[Int[Array, ""]] | None = None,
    gates: Gate | None = None,
    *,
    step,
    groups: HeadGroups,
    scorer: ChunkScorer,
    page_size: int,
    selects: bool,
    shrinks: bool,
    greedy: bool,
    kernels: KernelShape | None,
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
      layers: the numbers of the layers. As data they let the compiler make one kernel for all
        layers; without them each layer gets its own.
      gates: of all layers, for the scorer ``gates``.
      step: the model, see ``engine.model.Model.step``.
      groups: the head groups.
      scorer: scores of the tokens.
      page_size: rows of a page.
      selects: False where every head keeps everything: nothing is scored by queries then.
      shrinks: a target may lie below its length.
      greedy: take the most likely token whatever the sampling parameters are.
      kernels: shape to schedule the GPU kernels for, see ``ragged.head_kernels``.
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
    group_of, place_of = jnp.asarray(groups.group_of), jnp.asarray(groups.place_of)
    held = lengths[group_of, place_of]
    n_kv_heads, n_rows_of_pool = held.shape[1], kv.scores.size

    def run_work(starts, lengths, n_slots, most_keys):
        return ragged.run_work(
            starts,
            lengths,
            n_rows=n_tokens,
            n_slots=n_slots,
            most_keys=most_keys,
            kernels=kernels,
        )

    own_work = ragged.own_work(n_kv_heads, n_tokens, kernels=kernels)
    starts = jnp.arange(n_kv_heads, dtype=jnp.int32) * n_places
    earlier = run_work(
        jnp.broadcast_to(starts[None, :], held.shape), held, n_kv_heads * n_places, n_places
    )
    shared = None
    if prefix is not None:
        shared = run_work(prefix.starts, prefix.lengths, n_rows_of_pool, max_context)

    def attend(state, layer, q, k, v, hidden=None):
        kv, finite = state
        number = layer if layers is None else layers[layer]
        group, place = group_of[number], place_of[number]
        before, target = held[number], targets[group, place]
        token = jnp.arange(n_places, dtype=jnp.int32)[None, :]
        places = pool.rows_of(
            table[group],
            place,
            jnp.broadcast_to(token, (n_kv_heads, n_places)),
            page_size=page_size,
            group_size=groups.group_size,
        )
        live = token < before[:, None]
        old_k, old_v = pool.read_vectors(kv, places)
        old_v = jnp.where(live[..., None], old_v, 0)  # 0 × NaN of an unused slot is NaN
        # Rounded as the pool rounds, so that a prompt gives the same keys however it is cut.
        k, v = k.astype(old_k.dtype), v.astype(old_v.dtype)

        def attend_to(keys, values, work, **options):
            keys, values = keys.astype(q.dtype), values.astype(q.dtype)
            return ragged.attend_runs(q, keys, values, work, n_kv_heads=n_kv_heads, **options)

        parts = [
            attend_to(old_k, old_v, of_layer(earlier, number)),
            attend_to(k.swapaxes(0, 1), v.swapaxes(0, 1), own_work, causal=True),
        ]
        if shared is not None:
            parts.append(attend_to(kv.k, kv.v, of_layer(shared, number)))
        out, _ = merge_row_partials(parts, n_heads=q.shape[1], out_dtype=q.dtype)
        # The survivors are written over only when they have been read: else XLA copies the pool.
        out, old_k, old_v, kv = lax.optimization_barrier((out, old_k, old_v, kv))
        new_scores = scorer.on_arrival(layer, k, positions, of_layer(gates, number), hidden)
        kept_old, kept_new = live, jnp.broadcast_to((positions >= 0)[None, :], new_scores.shape)
        if selects:
            scores, at = candidates(q, k, v, kv, old_k, old_v, places, live, new_scores)
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
        return out, (kv, finite)

    def candidates(q, k, v, kv, old_k, old_v, places, live, new_scores):
        """Scores and positions of the survivors and the chunk's tokens, ``[K, S + C]`` each."""
        old_scores, old_positions = pool.read_notes(kv, places)
        new_positions = jnp.broadcast_to(positions[None, :], new_scores.shape)
        at = jnp.concatenate([jnp.where(live, old_positions, -1), new_positions], axis=1)
        if not scorer.by_queries:
            return jnp.concatenate([old_scores, new_scores], axis=1), at
        keys = jnp.concatenate([old_k, k.swapaxes(0, 1)], axis=1)
        values = jnp.concatenate([old_v, v.swapaxes(0, 1)], axis=1)
        return scorer.by_last_queries(q, positions, keys, values, at, max_context=max_context), at

    logits, (kv, finite) = step(
        params,
        chunk.tokens,
        jnp.maximum(positions, 0),
        (kv, jnp.bool_(True)),
        attend if gates is None else HiddenAttend(attend),
        rows=chunk.n_tokens[None] - 1,
    )
    draw = greedy_sample if greedy else sample
    token = draw(logits, row.temperature, row.top_k, row.top_p, row.seed, row.n_generated)
    return kv, token, finite
