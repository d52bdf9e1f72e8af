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
from pallas_kernels import rope_append
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
    # Key norms and gates want keys and hidden states, which projections do not give.
    kind = _Attend if scorer.name in ("key_norm", "gates") else _Projecting

    def cond(state):
        _, head, trace, finished = state
        return (trace.n_steps < n_steps) & jnp.any(head.rows.active) & (finished < max_finished)

    def body(state):
        kv, head, trace, finished = state
        rows = head.rows
        attend = kind(head, works, shared, layers, gates, groups, scorer, page_size)
        if gates is not None:
            attend = HiddenAttend(attend)
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


@dataclasses.dataclass(frozen=True)
class _Attend:
    """What the model calls in each layer: append a token to each head, then attend.

    Attributes:
      head: the rows.
      works, shared, layers, gates, groups, scorer, page_size: as for ``decode_loop``.
    """

    head: HeadBatch
    works: Sequence[DecodeWork] | None
    shared: SharedRows | None
    layers: Sequence[Int[Array, ""]] | None
    gates: Gate | None
    groups: HeadGroups
    scorer: ChunkScorer
    page_size: int

    def __call__(self, kv: HeadKV, layer: int, q, k, v, hidden=None):
        kv = self._note(kv, layer, k, hidden)
        kv = pool.write_vectors(kv, self._places(kv, layer), k, v)
        return self._decode(kv, layer, q), kv

    def _number(self, layer: int) -> int | Int[Array, ""]:
        return layer if self.layers is None else self.layers[layer]

    def _places(self, kv: HeadKV, layer: int) -> Int[Array, "B K"]:
        """Single-head row of the next token of each head; one behind the pool for idle rows."""
        number, head = self._number(layer), self.head
        group = jnp.asarray(self.groups.group_of)[number]
        place = jnp.asarray(self.groups.place_of)[number]
        rows = pool.rows_of(
            head.tables[:, group],
            jnp.broadcast_to(place[None, :], (head.tables.shape[0], place.shape[0])),
            head.lengths[:, group, place][..., None],
            page_size=self.page_size,
            group_size=self.groups.group_size,
        )[..., 0]
        return jnp.where(head.rows.active[:, None], rows, kv.scores.size)

    def _note(self, kv: HeadKV, layer: int, k, hidden=None) -> HeadKV:
        """Score and position of the new token of each head."""
        positions = jnp.where(self.head.rows.active, self.head.rows.lengths, -1)
        gate = of_layer(self.gates, self._number(layer))
        scores = self.scorer.on_arrival(layer, k, positions, gate, hidden).T
        at = jnp.broadcast_to(positions[:, None], scores.shape)
        return pool.write_notes(kv, self._places(kv, layer), scores, at)

    def _decode(self, kv: HeadKV, layer: int, q):
        active, shared = self.head.rows.active, self.shared
        prefix = None
        if shared is not None:
            number = self._number(layer)
            prefix = attend_shared(q, kv, number, shared, self.groups.n_kv_heads)
        return head_group_decode(
            q,
            kv.k,
            kv.v,
            self.head.tables,
            jnp.where(active[:, None, None], self.head.lengths + 1, 0),
            members=layer_members(self.groups, layer),
            page_size=self.page_size,
            scale=q.shape[-1] ** -0.5,
            work=None if self.works is None else self.works[layer],
            prefix=prefix,
            out_dtype=q.dtype,
        )[0]


class _Projecting(_Attend):
    """The same from projections as they come: the kernel that writes them encodes positions too.

    Each KV head of a row is a row of its own there, with a slot of its own.
    """

    def projected(self, kv: HeadKV, layer: int, qkv, cos, sin, norms=None, eps: float = 0.0):
        n_rows, n_heads, members, head_dim = qkv.shape
        kv = self._note(kv, layer, qkv[:, :, -2])
        k, v, q = rope_append(
            kv.k.reshape(-1, 1, head_dim),
            kv.v.reshape(-1, 1, head_dim),
            qkv.reshape(-1, 1, members, head_dim),
            jnp.repeat(cos, n_heads, axis=0),
            jnp.repeat(sin, n_heads, axis=0),
            self._places(kv, layer).reshape(-1),
            norms,
            eps=eps,
        )
        kv = dataclasses.replace(kv, k=k.reshape(kv.k.shape), v=v.reshape(kv.v.shape))
        return self._decode(kv, layer, q.reshape(n_rows, -1, head_dim)), kv
