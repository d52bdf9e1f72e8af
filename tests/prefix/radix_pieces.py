"""Short ways to write pieces, and to read where tokens lie."""

from collections.abc import Sequence

import numpy as np

from kvgrain_jax.prefix.node import Cold, Hot, Node, Piece
from kvgrain_jax.prefix.radix import RadixIndex


def cold(start: int, pages: list[int], page_size: int = 1) -> Piece:
    return Piece(start, start + len(pages) * page_size, Cold(np.array(pages, np.int32)))


def hot(start: int, stop: int, base: int) -> Piece:
    return Piece(start, stop, Hot(base))


def slots(index: RadixIndex, node: Node) -> list[int]:
    """The slot of every token of the prefix that ends with the node."""
    size = index.page_size
    return [int(page) * size + i for page in index.pages(node) for i in range(size)]


def places(pieces: Sequence[Piece]) -> list[tuple]:
    """Pieces in a form that can be compared."""
    return [
        (p.start, p.stop, p.tag.base if isinstance(p.tag, Hot) else p.tag.pages.tolist())
        for p in pieces
    ]
