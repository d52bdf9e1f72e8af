"""Staging of a prefill chunk: where its tokens, and earlier ones in pages, lie side by side.

    [ earlier tokens of part 0 | its own ] gap [ earlier tokens of part 1 | its own ] ...

Enters how many tokens each part has; leaves the layout. Kernels read contiguous keys best.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvgrain_jax.attention.segments import Segment
from pallas_kernels.segment_attention.schedule import ALIGNMENT

TILE = 128  # sources are padded to a multiple of it


class StagedPart(NamedTuple):
    """What a part of a chunk has.

    Attributes:
      pages: index of its first earlier token in pages, in the flattened page tables.
      earlier: how many of them.
      n_tokens: tokens of its own.
    """

    pages: int
    earlier: int
    n_tokens: int


@dataclasses.dataclass(frozen=True)
class Staging:
    """The layout.

    Attributes:
      cold: earlier tokens for which there was no room, as indices of the flattened page tables.
      own: of each part the staged tokens.
      before: how many of these are earlier ones.
      sources: where each staged token comes from: an index of the flattened page tables, or, behind
        these, of the chunk.
      n_staged: how many of the ``sources`` count.
    """

    cold: list[Segment]
    own: list[Segment]
    before: list[int]
    sources: Int[np.ndarray, "S"]
    n_staged: int


def stage(
    parts: Sequence[StagedPart], *, n_tokens: int, n_paged: int, max_parts: int, room: int
) -> Staging:
    """Lay out the tokens of a chunk, each part's behind the earlier ones for which there is room.

    Args:
      parts: the parts, in the order of their tokens.
      n_tokens: tokens of the chunk, padding included.
      n_paged: tokens of the flattened page tables.
      max_parts: parts at most; decides with ``n_tokens`` and ``room`` how many sources there are.
      room: earlier tokens at most. Without any the tokens are those of the chunk, in place.
    """
    alignment = ALIGNMENT if room else 1
    size = n_tokens
    if room:
        size = -(-(n_tokens + room + ALIGNMENT * max_parts) // TILE) * TILE
    sources = np.zeros(size, np.int32)
    cold, own, before = [], [], []
    token, end, left = 0, 0, room
    for pages, earlier, n in parts:
        if earlier > left:
            cold.append(Segment(pages, earlier, token, n))
            earlier = 0
        left -= earlier
        own.append(Segment(end, earlier + n, token, n))
        before.append(earlier)
        sources[end : end + earlier] = np.arange(pages, pages + earlier)
        sources[end + earlier : end + earlier + n] = np.arange(token, token + n) + n_paged
        token += n
        end += -(-(earlier + n) // alignment) * alignment
    return Staging(cold, own, before, sources, end)
