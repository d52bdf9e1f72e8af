"""The decode loop over head groups: many steps in one jitted program, no host transfer inside.

A row appends one token to each of its heads, at the end of that head's own list; the pages for it
were reserved at admission, so a step allocates nothing. The split table of the attention kernel is
made before the first request: nothing is planned while decoding. Source: Tangram §4.3.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from kvgrain_jax.budgets import pool
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.gates import Gate
from kvgrain_jax.budgets.groups import HeadGroups
from kvgrain_jax.budgets.partition import SplitTable
from kvgrain_jax.budgets.pool import HeadKV
from kvgrain_jax.budgets.ragged import of_layer
from kvgrain_jax.budgets.shared import SharedRows, attend_shared
from kvgrain_jax.engine import batch as batches
from kvgrain_jax.engine.batch import Batch
from kvgrain_jax.engine.decode_loop import advance
from kvgrain_jax.engine.model import HiddenAttend
from kvgrain_jax.engine.sampling import greedy_sample, sample
from pallas_kernels.head_group_decode import DecodeWork, head_group_decode, layer_work


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBatch:
    """State of every row of the batch.

    Attributes:
      rows: tokens, sampling parameters and what is left to generate; ``rows.lengths`` is the
        position of the next token, ``rows.pages`` is not used.
      tables: page table of each row and group.
      lengths: tokens that each member of each group holds.
    """

    rows: Batch
    tables: Int[Array, "B n_groups T"]
    lengths: Int[Array, "B n_groups G_h"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadTrace:
    """What a call of the decode loop did; entries from ``n_steps`` on are unused.

    Attributes:
      tokens: token of each row in each step, -1 where the row was not active.
      n_steps: steps that ran.
    """

    tokens: Int[Array | np.ndarray, "steps B"]
    n_steps: Int[Array | np.ndarray, ""]


def init(n_rows: int, n_pages: int, groups: HeadGroups) -> HeadBatch:
    """A batch of empty rows with room for ``n_pages`` pages in each group."""
    return HeadBatch(
        rows=batches.init(n_rows, 1),
        tables=jnp.full((n_rows, groups.n_groups, n_pages), -1, jnp.int32),
        lengths=jnp.zeros((n_rows, groups.n_groups, groups.group_size), jnp.int32),
    )


@partial(jax.jit, donate_argnums=0)
def set_row(batch: HeadBatch, index: Int[Array, ""], row: HeadBatch) -> HeadBatch:
    """Put a batch of one row at ``index``."""
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y[0], index, 0), batch, row)


@partial(jax.jit, donate_argnums=0)
def deactivate(batch: HeadBatch, index: Int[Array, ""]) -> HeadBatch:
    """End the row at ``index``."""
    active = batch.rows.active.at[index].set(False)
    return dataclasses.replace(batch, rows=dataclasses.replace(batch.rows, active=active))


@partial(
    jax.jit,
    static_argnames=(
        "step",
        "n_rows",
        "max_steps",
        "groups",
        "scorer",
        "page_size",
        "greedy",
    ),
    donate_argnames=("kv", "batch"),
)
def decode_loop(
    params,
    kv: HeadKV,
    batch: HeadBatch,
    n_steps: Int[Array, ""],
    max_finished: Int[Array, ""],
    works: Sequence[DecodeWork] | None = None,
    shared: SharedRows | None = None,
    layers: Sequence[Int[Array, ""]] | None = None,
    gates: Gate | None = None,
    *,
    step,
    n_rows: int,
    max_steps: int,
    groups: HeadGroups,
    scorer: ChunkScorer,
    page_size: int,
    greedy: bool,
) -> tuple[HeadKV, HeadBatch, HeadTrace]:
    """Decode up to ``n_steps`` tokens of every active row.

    Args:
      params: weights of the model.
      kv: the pool; donated.
      batch: the batch; donated.
      n_steps: steps to run, at most ``max_steps``.
      max_finished: stop after the step in which so many rows have finished.
      works: for each layer into how many parts the kernel cuts each head's tokens, see
        ``layer_works``; None cuts none.
      shared: prefixes that the rows share; None where no request may.
      layers: the numbers of the layers as data, see ``prefill.prefill_chunk``.
      gates: of all layers, for the scorer ``gates``.
      step: the model, see ``engine.model.Model.step``.
      n_rows: rows in front of the batch to compute (a bucket).
      max_steps: capacity of the trace.
      groups: the head groups.
      scorer: scores that new tokens get on arrival.
      page_size: rows of a page.
      greedy: take the most likely tokens whatever the sampling parameters are.

    Returns:
      ``(kv, batch, trace)``. The loop ends after ``n_steps``, when no row is active, or when
      ``max_finished`` rows have finished.
    """
    head = jax.tree.map(lambda x: x[:n_rows], batch)
    n_steps = jnp.minimum(n_steps, max_steps)

    def cond(state):
        _, head, trace, finished = state
        return (trace.n_steps < n_steps) & jnp.any(head.rows.active) & (finished < max_finished)

    def body(state):
        kv, head, trace, finished = state
        rows = head.rows
        attend = _attend(
            head, works, shared, layers, gates, groups=groups, scorer=scorer, page_size=page_size
        )
        logits, kv = step(params, rows.tokens, rows.lengths, kv, attend)
        token = (greedy_sample if greedy else sample)(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.seed, rows.n_generated
        )
        trace = HeadTrace(
            tokens=trace.tokens.at[trace.n_steps].set(jnp.where(rows.active, token, -1)),
            n_steps=trace.n_steps + 1,
        )
        after = HeadBatch(
            rows=advance(rows, token, rows.pages),
            tables=head.tables,
            lengths=head.lengths + rows.active.astype(jnp.int32)[:, None, None],
        )
        finished += jnp.sum(rows.active & ~after.rows.active, dtype=jnp.int32)
        return kv, after, trace, finished

    trace = HeadTrace(jnp.full((max_steps, n_rows), -1, jnp.int32), jnp.int32(0))
    kv, head, trace, _ = lax.while_loop(cond, body, (kv, head, trace, jnp.int32(0)))
    return kv, batches.put_first(batch, head), trace


def layer_members(groups: HeadGroups, layer: int) -> np.ndarray:
    """KV head of a layer that each member of each group is, int32 ``[n_groups, G_h]``; -1 if none."""
    return np.where(groups.members[..., 0] == layer, groups.members[..., 1], -1).astype(np.int32)


def layer_works(
    groups: HeadGroups, splits: SplitTable | None, *, n_blocks: int, n_rows: int, n_heads: int
) -> list[DecodeWork]:
    """Work list of the decode kernel for each layer, all of one size whatever the split table is.

    Args:
      groups: the head groups.
      splits: into how many parts each head's tokens are cut; None cuts none.
      n_blocks: blocks of one row that the table was made for.
      n_rows: rows of the batch.
      n_heads: query heads.
    """
    return [
        jax.tree.map(
            jnp.asarray,
            layer_work(
                layer_members(groups, layer),
                None if splits is None else tuple(splits.splits[layer].tolist()),
                n_rows=n_rows,
                n_heads=n_heads,
                n_entries=groups.n_kv_heads + (0 if splits is None else n_blocks),
                width=1 if splits is None else n_blocks,
            ),
        )
        for layer in range(groups.n_layers)
    ]


def _attend(
    head: HeadBatch,
    works: Sequence[DecodeWork] | None,
    shared: SharedRows | None,
    layers: Sequence[Int[Array, ""]] | None,
    gates: Gate | None,
    *,
    groups: HeadGroups,
    scorer: ChunkScorer,
    page_size: int,
):
    """What the model calls in each layer: append a token to each head, then attend."""
    active = head.rows.active
    positions = jnp.where(active, head.rows.lengths, -1)
    lengths = jnp.where(active[:, None, None], head.lengths + 1, 0)
    group_of, place_of = jnp.asarray(groups.group_of), jnp.asarray(groups.place_of)

    def attend(kv: HeadKV, layer: int, q, k, v, hidden=None):
        number = layer if layers is None else layers[layer]
        group, place = group_of[number], place_of[number]
        n_rows, n_heads, head_dim = k.shape
        row = pool.rows_of(
            head.tables[:, group],
            jnp.broadcast_to(place[None, :], (n_rows, n_heads)),
            head.lengths[:, group, place][..., None],
            page_size=page_size,
            group_size=groups.group_size,
        )[..., 0]
        kv = pool.write(
            kv,
            jnp.where(active[:, None], row, kv.scores.size).reshape(-1),
            k.reshape(-1, head_dim),
            v.reshape(-1, head_dim),
            scorer.on_arrival(layer, k, positions, of_layer(gates, number), hidden).T.reshape(-1),
            jnp.broadcast_to(positions[:, None], (n_rows, n_heads)).reshape(-1),
        )
        out, _ = head_group_decode(
            q,
            kv.k,
            kv.v,
            head.tables,
            lengths,
            members=layer_members(groups, layer),
            page_size=page_size,
            scale=head_dim**-0.5,
            work=None if works is None else works[layer],
            prefix=attend_shared(q, kv, number, shared, n_heads) if shared else None,
            out_dtype=q.dtype,
        )
        return out, kv

    return attend if gates is None else HiddenAttend(attend)
