"""What comes into the prefix index from outside is checked here, before it touches the tree."""

from collections.abc import Sequence

import numpy as np

from kvgrain_jax.errors import KVGrainError, RequestError
from kvgrain_jax.prefix.node import Hot, Piece


def token_ids(tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    """The tokens as int32 ``[n]``.

    Raises:
      RequestError: they are not one row of integers in ``[0, 2**31)``.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise RequestError(f"The tokens have shape {array.shape}; give one row of token ids.")
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise RequestError(f"The tokens are {array.dtype}; token ids are integers.")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise RequestError(
            f"The tokens run from {array.min()} to {array.max()}; token ids lie in [0, 2**31)."
        )
    return array.astype(np.int32, copy=False)


def leading(name: str, count: int, length: int, page_size: int) -> int:
    """A count of leading tokens, cut to ``length`` and to whole pages.

    Raises:
      RequestError: the count is negative.
    """
    if count < 0:
        raise RequestError(f"{name} is {count}; give a number of tokens of at least 0.")
    return min(count, length) // page_size * page_size


def hot_base(base: int, page_size: int) -> None:
    """Check the base of a slab or of a part of one.

    Raises:
      KVGrainError: it is negative or no multiple of the page size.
    """
    if base < 0 or base % page_size:
        raise KVGrainError(
            f"A HOT base is {base}; give a slot of at least 0 that is a multiple of the page size, "
            f"{page_size}."
        )


def pieces(pieces: Sequence[Piece], length: int, page_size: int) -> None:
    """Check that pieces cover ``[c, length)`` for some ``c``, in order, and fit their tags.

    Raises:
      KVGrainError: they do not, or they name a page twice.
    """
    if length % page_size:
        raise KVGrainError(
            f"{length} tokens are no whole number of pages of {page_size}; hand over only pages "
            "that are full."
        )
    position = pieces[0].start if pieces else length
    for piece in pieces:
        where = f"The piece for tokens [{piece.start}, {piece.stop})"
        if piece.start != position or piece.start < 0 or piece.stop <= piece.start:
            raise KVGrainError(
                f"{where} should begin at token {position} and hold at least one page; give "
                "pieces in order and without gaps."
            )
        if piece.start % page_size or piece.stop % page_size:
            raise KVGrainError(f"{where} does not begin and end with a page of {page_size} tokens.")
        if isinstance(piece.tag, Hot):
            hot_base(piece.tag.base, page_size)
        elif piece.tag.pages.size * page_size != piece.length:
            raise KVGrainError(
                f"{where} has {piece.tag.pages.size} pages of {page_size} tokens; it needs "
                f"{piece.length // page_size}."
            )
        position = piece.stop
    if position != length:
        raise KVGrainError(
            f"The pieces end at token {position} of {length}; they should cover all up to the end."
        )
    if pieces:
        numbers, counts = np.unique(
            np.concatenate([piece.pages(page_size) for piece in pieces]), return_counts=True
        )
        if counts.max() > 1:
            raise KVGrainError(f"The pieces name page {numbers[counts.argmax()]} twice.")
