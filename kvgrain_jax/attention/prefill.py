"""Chunked prefill: many tokens of several requests in one call, causal, over the same buffers.

The HOT part of a request's context is read contiguously, the COLD part through its page table.
Both are segment attention with the causal mask, so a chunk may lie anywhere: behind the prefix,
inside the slab that it is just computing, or across both.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvgrain_jax.attention.decode import page_slots
from kvgrain_jax.attention.partial import AttentionPartial, merge
from kvgrain_jax.attention.plan import Segment, Tiling, WorkList, make_work_list
from pallas_kernels import segment_attention

PREFILL_TILING = Tiling(row_tile=64, kv_tile=256)


@dataclasses.dataclass(frozen=True)
class ChunkPart:
    """The tokens of one request in a chunk.

    Attributes:
      row: row of the request in the batch.
      first: position of its first token in the chunk.
      n_tokens: how many tokens of it are in the chunk.
      hot: ``(base, length)`` of the contiguous pieces at the front of its context, in order. They
        may reach beyond the chunk; the causal mask hides what is not yet computed.
    """

    row: int
    first: int
    n_tokens: int
    hot: tuple[tuple[int, int], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CausalSegments:
    """Segments whose keys have positions: the causal mask of ``segment_attention``.

    Attributes:
      segments: ``(base, length, first_row, n_rows)``, rows being tokens of the chunk.
      first_positions: position of the first key of each segment.
      work: tiles that at least one token sees.
    """

    segments: Int[Array, "C 4"]
    first_positions: Int[Array, "C"]
    work: WorkList


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """What the tokens of one chunk attend to.

    Attributes:
      hot: contiguous segments of slots.
      cold: segments of the flattened page tables of the batch.
    """

    hot: CausalSegments
    cold: CausalSegments


def make_prefill_plan(
    parts: Sequence[ChunkPart],
    *,
    n_tokens: int,
    row_tokens: int,
    n_slots: int,
    max_parts: int,
    max_pieces: int,
    tiling: Tiling = PREFILL_TILING,
) -> PrefillPlan:
    """Build the plan of a chunk. Its shapes depend on the keyword arguments only.

    Args:
      parts: the requests in the chunk, in the order of their tokens.
      n_tokens: tokens of the chunk, padding included.
      row_tokens: tokens of one row of the page table.
      n_slots: ``N``, slots of the pool.
      max_parts: requests in a chunk at most.
      max_pieces: contiguous pieces of one request at most.
      tiling: tile of the work lists.
    """
    hot, hot_positions, cold, cold_positions = [], [], [], []
    first_of_token: dict[int, int] = {}  # first token of a part in the chunk, to its position
    token = 0
    for part in parts:
        first_of_token[token] = part.first
        seen = part.first + part.n_tokens
        position = 0
        for base, length in part.hot:
            if position < seen:
                visible = min(length, seen - position)
                hot.append(Segment(base, visible, token, part.n_tokens))
                hot_positions.append(position)
            position += length
        if position < seen:
            base = part.row * row_tokens + position
            cold.append(Segment(base, seen - position, token, part.n_tokens))
            cold_positions.append(position)
        token += part.n_tokens

    def causal(segments: list[Segment], positions: list[int], capacity: int) -> CausalSegments:
        def visible(i: int, row: int, kv: int) -> bool:
            segment = segments[i]
            last_row = min(row + tiling.row_tile, segment.n_rows) - 1
            return positions[i] + kv <= first_of_token[segment.first_row] + last_row

        table = np.zeros((capacity, 4), np.int32)
        first = np.zeros(capacity, np.int32)
        if segments:
            table[: len(segments)] = np.asarray(segments, np.int32)
            first[: len(segments)] = positions
        row_tiles = -(-n_tokens // tiling.row_tile)
        # Parts have disjoint rows, so their row tiles add up to those of the chunk and one each.
        tiles = (row_tiles + max_parts) * (row_tokens // tiling.kv_tile + max_pieces + 1)
        return CausalSegments(
            segments=jnp.asarray(table),
            first_positions=jnp.asarray(first),
            work=make_work_list(segments, tiling, tiles, visible=visible),
        )

    return PrefillPlan(
        hot=causal(hot, hot_positions, max_parts * max_pieces),
        cold=causal(cold, cold_positions, max_parts),
    )


def prefill_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    plan: PrefillPlan,
    pages: Int[Array, "B pages"],
    positions: Int[Array, "T"],
    *,
    page_size: int,
    scale: float | None = None,
) -> AttentionPartial:
    """Causal attention of the tokens of one chunk to the contexts of their requests.

    Args:
      q: queries of the chunk.
      k: keys of one layer, the chunk's own already written.
      v: values of one layer.
      plan: what the tokens attend to.
      pages: page tables of the batch, int32.
      positions: position of each token in its request, int32.
      page_size: tokens of a page.
      scale: factor of the scores; ``D ** -0.5`` where None.

    Returns:
      Output and log-sum-exp of every token and head; ``(0, -inf)`` for padding.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def attend(part: CausalSegments, slots: Int[Array, "I"] | None) -> AttentionPartial:
        return AttentionPartial(
            *segment_attention(
                q,
                k,
                v,
                part.segments,
                part.work.items,
                part.work.n_items,
                row_tile=part.work.tiling.row_tile,
                kv_tile=part.work.tiling.kv_tile,
                scale=factor,
                slots=slots,
                row_positions=positions,
                first_positions=part.first_positions,
            )
        )

    return merge(
        [attend(plan.hot, None), attend(plan.cold, page_slots(pages.reshape(-1), page_size))]
    )
