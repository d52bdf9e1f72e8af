"""Chunked prefill: many tokens of several requests in one call, causal, over the same buffers.

    context of a token:  [ earlier, contiguous ][ earlier, in pages ][ its own chunk, causal ]
                           slots of the pool      page table           keys of this call

Earlier tokens are all visible, so both pool parts are plain segment attention, and adjacent requests
behind one prefix share its segment as decode rows do. Only the keys that the chunk brings along need
the causal mask, and they lie side by side.

On a GPU earlier tokens in pages are first copied in front of their request's own ones
(``stage_kv``), as many as there is room for, and read with these as one causal segment.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from kvgrain_jax.attention.decode import page_slots
from kvgrain_jax.attention.partial import AttentionPartial
from kvgrain_jax.attention.plan import (
    DENSE_FOLDED_ROWS,
    MAX_LEVELS,
    KernelShape,
    Tiling,
    WorkList,
    make_schedule,
    make_work_list,
    plan_holds,
)
from kvgrain_jax.attention.segments import HotPiece, Segment, segments_that_fit
from kvgrain_jax.attention.staging import StagedPart, stage
from pallas_kernels import merge_row_partials, segment_partials, stage_kv
from pallas_kernels.row_partials import RowPartials

PREFILL_TILING = Tiling(row_tile=64, kv_tile=256)


@dataclasses.dataclass(frozen=True)
class ChunkPart:
    """The tokens of one request in a chunk.

    Attributes:
      row: row of the request in the batch.
      first: position of its first token in the chunk.
      n_tokens: how many tokens of it are in the chunk.
      hot: contiguous pieces at the front of its context, in order. They may reach into the chunk
        and beyond: what lies behind ``first`` is not read from the pool.
    """

    row: int
    first: int
    n_tokens: int
    hot: tuple[HotPiece, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentWork:
    """Segments whose rows are tokens of the chunk.

    Attributes:
      segments: ``(base, length, first_row, n_rows)``, int32, padded with empty segments.
      work: their tiles.
    """

    segments: Int[Array, "*layers C 4"]
    work: WorkList


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """What the tokens of one chunk attend to.

    Attributes:
      hot: earlier tokens in contiguous slots.
      cold: earlier tokens in pages, as indices of the flattened page tables of the batch.
      own: tokens of the chunk itself, behind the earlier ones staged with them: indices of the
        staged tokens; of the chunk, where none are staged.
      first: position in the chunk of the first key of each segment of ``own``: negative where
        earlier tokens lie in front.
      staged: where each staged token comes from, see ``staging.Staging``; None where nothing is
        staged.
      n_staged: how many of them count.
    """

    hot: SegmentWork
    cold: SegmentWork
    own: SegmentWork
    first: Int[Array, "C"]
    staged: Int[Array, "S"] | None
    n_staged: Int[Array, ""]


def make_prefill_plan(
    parts: Sequence[ChunkPart],
    *,
    n_tokens: int,
    n_rows: int,
    row_tokens: int,
    n_slots: int,
    max_parts: int,
    max_pieces: int,
    max_staged: int = 0,
    tiling: Tiling = PREFILL_TILING,
    kernels: KernelShape | None = None,
) -> PrefillPlan:
    """Build the plan of a chunk. Its shapes depend on the keyword arguments only.

    Args:
      parts: the requests in the chunk, in the order of their tokens; those that share contiguous
        pieces side by side share the segments.
      n_tokens: tokens of the chunk, padding included.
      n_rows: ``B``, rows of the batch.
      row_tokens: tokens of one row of the page table.
      n_slots: ``N``, slots of the pool.
      max_parts: requests in a chunk at most.
      max_pieces: contiguous segments of a chunk at most, beyond one for each request; the innermost
        pieces of a chunk that has more, or deeper ones than the plan has room for, are read through
        the page tables.
      max_staged: earlier tokens in pages that are staged at most; what has no room is read through
        the page tables.
      tiling: tile of the work lists.
      kernels: shape to schedule the GPU kernels for.
    """
    max_hot = max_parts + max_pieces
    ends = np.cumsum([0, *(part.n_tokens for part in parts)]).tolist()

    def of_tokens(segments: Sequence[Segment]) -> list[Segment]:
        return [
            Segment(base, length, ends[first], ends[first + n] - ends[first])
            for base, length, first, n in segments
        ]

    def fits(segments: Sequence[Segment]) -> bool:
        return plan_holds(
            of_tokens(segments),
            kernels,
            n_rows=n_tokens,
            max_segments=max_hot,
            tiles=(DENSE_FOLDED_ROWS,),
        )

    shared, pieces = segments_that_fit([_earlier(part) for part in parts], fits)
    hot = of_tokens(shared)
    skipped = [sum(piece.length for piece in of_part) for of_part in pieces]
    staging = stage(
        [
            StagedPart(part.row * row_tokens + n, part.first - n, part.n_tokens)
            for part, n in zip(parts, skipped, strict=True)
        ],
        n_tokens=n_tokens,
        n_paged=n_rows * row_tokens,
        max_parts=max_parts,
        room=max_staged,
    )

    work = functools.partial(
        _segment_work, n_tokens=n_tokens, row_tokens=row_tokens, tiling=tiling, kernels=kernels
    )
    own, before = staging.own, staging.before
    first = np.zeros(max_parts, np.int32)
    first[: len(own)] = [s.first_row - n for s, n in zip(own, before, strict=True)]
    return PrefillPlan(
        hot=work(hot, n_slots=n_slots, max_segments=max_hot, levels=MAX_LEVELS),
        cold=work(staging.cold, n_slots=n_rows * row_tokens, max_segments=max_parts),
        own=work(own, n_slots=len(staging.sources), max_segments=max_parts, earlier=before),
        first=jnp.asarray(first),
        staged=jnp.asarray(staging.sources) if max_staged else None,
        n_staged=jnp.int32(staging.n_staged),
    )


def _segment_work(
    segments: Sequence[Segment],
    *,
    n_tokens: int,
    row_tokens: int,
    n_slots: int,
    max_segments: int,
    tiling: Tiling,
    kernels: KernelShape | None,
    levels: int = 1,
    earlier: Sequence[int] | None = None,
) -> SegmentWork:
    """Segments over ``n_slots`` keys, and their tiles; see ``make_work_list`` for ``earlier``."""
    table = np.zeros((max_segments, 4), np.int32)
    table[: len(segments)] = np.asarray(segments, np.int32).reshape(-1, 4)
    tile = Tiling(min(tiling.row_tile, n_tokens), min(tiling.kv_tile, n_slots))
    # Segments of one part of the context have disjoint rows or nest, so a row tile takes in at most
    # a row's context, and each segment may leave one tile of rows and keys unfilled.
    tiles = (-(-n_tokens // tile.row_tile) + max_segments) * (
        -(-row_tokens // tile.kv_tile) + max_segments
    )
    diagonals = None
    if earlier is not None:
        diagonals = [segment.base + n for segment, n in zip(segments, earlier, strict=True)]
    schedule = make_schedule(
        segments,
        kernels,
        n_rows=n_tokens,
        n_slots=n_slots,
        max_segments=max_segments,
        levels=levels,
        diagonals=diagonals,
    )
    work = make_work_list(segments, tile, tiles, earlier=earlier, schedule=schedule)
    return SegmentWork(jnp.asarray(table), work)


def _earlier(part: ChunkPart) -> list[HotPiece]:
    """The contiguous pieces of a part's context up to its first token."""
    pieces, position = [], 0
    for piece in part.hot:
        length = min(piece.length, part.first - position)
        if length <= 0:
            break
        pieces.append(piece._replace(length=length))
        position += length
    return pieces


def prefill_attention(
    q: Float[Array, "T H D"],
    new_k: Float[Array, "T K D"],
    new_v: Float[Array, "T K D"],
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    plan: PrefillPlan,
    pages: Int[Array, "B pages"],
    *,
    page_size: int,
    scale: float | None = None,
    out_dtype: DTypeLike = jnp.float32,
) -> AttentionPartial:
    """Causal attention of the tokens of one chunk to the contexts of their requests.

    Args:
      q: queries of the chunk.
      new_k: keys of the chunk; rounded to the dtype of the pool before use, so that a prompt gives
        the same keys however it is cut into chunks.
      new_v: values of the chunk.
      k: keys of one layer.
      v: values of one layer.
      plan: what the tokens attend to.
      pages: page tables of the batch, int32.
      page_size: tokens of a page.
      scale: factor of the scores; ``D ** -0.5`` where None.
      out_dtype: of the output.

    Returns:
      Output and log-sum-exp of every token and head; ``(0, -inf)`` for padding.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def attend(part: SegmentWork, keys, values, **options) -> RowPartials:
        return segment_partials(
            q,
            keys,
            values,
            part.segments,
            part.work.items,
            part.work.n_items,
            row_tile=part.work.tiling.row_tile,
            kv_tile=part.work.tiling.kv_tile,
            scale=factor,
            schedule=part.work.schedule,
            **options,
        )

    order = jnp.arange(q.shape[0], dtype=jnp.int32)
    slots = page_slots(pages.reshape(-1), page_size)
    own_k, own_v = new_k.astype(k.dtype), new_v.astype(v.dtype)
    if plan.staged is not None:
        n_paged = slots.shape[0]
        new = k.shape[0] + plan.staged - n_paged
        source = jnp.where(plan.staged < n_paged, slots.at[plan.staged].get(mode="clip"), new)
        own_k, own_v = stage_kv(k, v, own_k, own_v, source, plan.n_staged)
    out, lse = merge_row_partials(
        [
            attend(plan.hot, k, v),
            attend(plan.cold, k, v, slots=slots),
            attend(plan.own, own_k, own_v, row_positions=order, first_positions=plan.first),
        ],
        n_heads=q.shape[1],
        out_dtype=out_dtype,
    )
    return AttentionPartial(out, lse)
