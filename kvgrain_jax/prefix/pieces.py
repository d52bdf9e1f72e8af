"""Lists of pieces: cutting them, and finding what two of them both hold."""

import dataclasses
import itertools
from collections.abc import Sequence

from kvgrain_jax.errors import KVGrainError
from kvgrain_jax.prefix.node import Piece, Tag


@dataclasses.dataclass(frozen=True, eq=False)
class Duplicate:
    """Tokens ``[start, stop)`` that were inserted although the index had them already.

    Attributes:
      start: position of the first token.
      stop: position behind the last token.
      yours: the caller's copy, which it still owns and should free.
      kept: the index's copy, to be used instead.
    """

    start: int
    stop: int
    yours: Tag
    kept: Tag


def cut(pieces: Sequence[Piece], start: int, at: int, page_size: int) -> list[Piece]:
    """The pieces from position ``start`` on, so that one of them ends at position ``at``."""
    parts: list[Piece] = []
    for piece in pieces:
        low = max(piece.start, start)
        middle = min(max(low, at), piece.stop)
        for edges in ((low, middle), (middle, piece.stop)):
            if edges[0] < edges[1]:
                parts.append(piece.part(*edges, page_size))
    return parts


def duplicates(
    kept: Sequence[Piece], yours: Sequence[Piece], stop: int, page_size: int
) -> list[Duplicate]:
    """Where two lists of pieces hold the same positions, up to ``stop``, in different pages.

    Raises:
      KVGrainError: within a run, some pages are the same and others are not.
    """
    found: list[Duplicate] = []
    for mine, other in itertools.product(kept, yours):
        low, high = max(mine.start, other.start), min(mine.stop, other.stop, stop)
        if low >= high:
            continue
        mine, other = mine.part(low, high, page_size), other.part(low, high, page_size)
        same = mine.pages(page_size) == other.pages(page_size)
        if same.any() and not same.all():
            raise KVGrainError(
                f"The pieces for tokens [{low}, {high}) mix pages that the index owns with "
                "others; give the pieces from the end of the locked prefix on."
            )
        if not same.any():
            found.append(Duplicate(low, high, other.tag, mine.tag))
    return found
