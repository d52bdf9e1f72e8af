"""Segments: enter the contiguous pieces of each row's context, leaves which rows share which keys."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class HotPiece(NamedTuple):
    """A contiguous range of slots at the front of a row's context.

    ``owner`` names the prefix class: two rows share a piece if and only if the whole piece is
    equal, owner included. Sharing is never guessed from lengths or reference counts.
    """

    owner: int
    base: int
    length: int


class Segment(NamedTuple):
    """A contiguous range of keys and the run of adjacent rows that attends to it."""

    base: int
    length: int
    first_row: int
    n_rows: int


def find_segments(rows: Sequence[Sequence[HotPiece]]) -> list[Segment]:
    """Segments of rows whose contexts begin with contiguous pieces.

    Adjacent rows that hold the same piece at the same depth share one segment (nested segments:
    system prompt, persona, history). Segments of the same rows that follow each other in memory
    (the halves of a split slab) become one.

    Args:
      rows: for each row of the batch its pieces, front of the context first. Rows that share
        pieces should be adjacent (sort them by their pieces).

    Returns:
      The segments, outermost first.
    """
    segments: list[Segment] = []
    depth = 0
    while any(len(pieces) > depth for pieces in rows):
        first = 0
        while first < len(rows):
            head = tuple(rows[first][: depth + 1])
            n = 1
            while first + n < len(rows) and tuple(rows[first + n][: depth + 1]) == head:
                n += 1
            if len(head) > depth:
                segments.append(Segment(head[-1].base, head[-1].length, first, n))
            first += n
        depth += 1
    joined: list[Segment] = []
    for segment in segments:
        for i, other in enumerate(joined):
            if other.base + other.length == segment.base and other[2:] == segment[2:]:
                joined[i] = other._replace(length=other.length + segment.length)
                break
        else:
            joined.append(segment)
    return joined


def segments_that_fit(
    rows: Sequence[Sequence[HotPiece]], fits: Callable[[Sequence[Segment]], bool]
) -> tuple[list[Segment], Sequence[Sequence[HotPiece]]]:
    """Segments of as many levels of pieces as fit, the outer ones first.

    Args:
      rows: as for ``find_segments``.
      fits: whether the plan holds these segments. It holds none at all.

    Returns:
      The segments, and the pieces that they cover: rows read the others through their page tables.
    """
    depth = max(map(len, rows), default=0)
    while not fits(segments := find_segments(rows)):
        depth -= 1
        rows = [pieces[:depth] for pieces in rows]
    return segments, rows
