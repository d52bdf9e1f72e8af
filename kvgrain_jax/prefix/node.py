"""Pool tags and nodes: what the prefix index is made of.

A tag says in which pool the KV of a run of tokens lies, and where. Slots of both pools are numbered
in one index space and slab bases are multiples of the page size, so a HOT run is made of pages
too: consecutive ones. Nothing here changes a tree; ``tree`` does.
"""

import dataclasses
import functools

import numpy as np

from kvgrain_jax.errors import KVGrainError


@dataclasses.dataclass(frozen=True)
class Hot:
    """Tokens in consecutive slots of a slab: token ``i`` of the run is in slot ``base + i``.

    Attributes:
      base: slot of the first token.
    """

    base: int

    def part(self, start: int, stop: int, page_size: int) -> "Hot":
        """Tag of tokens ``[start, stop)`` of the run: the same slab, further on."""
        return Hot(self.base + start)

    def page_ids(self, length: int, page_size: int) -> np.ndarray:
        """Pages of the ``length`` tokens of the run, int32 ``[length // page_size]``."""
        first = self.base // page_size
        return np.arange(first, first + length // page_size, dtype=np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Cold:
    """Tokens in pages that lie anywhere: token ``i`` is in page ``pages[i // page_size]``.

    Attributes:
      pages: int32 ``[length // page_size]``; kept as a read-only copy.

    Raises:
      KVGrainError: the pages are not a one-dimensional array of integers in the range of int32.
    """

    pages: np.ndarray

    def __post_init__(self):
        pages = np.asarray(self.pages)
        if pages.ndim != 1 or (pages.size and pages.dtype.kind not in "iu"):
            raise KVGrainError(
                f"COLD pages are {pages.dtype} of shape {pages.shape}; give one row of integers."
            )
        if pages.size and not 0 <= pages.min() <= pages.max() <= np.iinfo(np.int32).max:
            raise KVGrainError(
                f"COLD pages hold a page number out of range: {pages.min()} to {pages.max()}."
            )
        pages = pages.astype(np.int32)
        pages.flags.writeable = False
        object.__setattr__(self, "pages", pages)

    @functools.cached_property
    def consecutive(self) -> bool:
        """Whether the pages follow each other, so that the tokens lie in consecutive slots."""
        return bool(self.pages.size) and bool(np.all(np.diff(self.pages) == 1))

    def part(self, start: int, stop: int, page_size: int) -> "Cold":
        """Tag of tokens ``[start, stop)`` of the run, both multiples of the page size."""
        return Cold(self.pages[start // page_size : stop // page_size])

    def page_ids(self, length: int, page_size: int) -> np.ndarray:
        """Pages of the tokens of the run, int32 ``[length // page_size]``."""
        return self.pages


Tag = Hot | Cold


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Where the KV of tokens ``[start, stop)`` of a sequence lie.

    Attributes:
      start: position of the first token in its sequence, a multiple of the page size.
      stop: position behind the last token, a multiple of the page size.
      tag: pool and place.
    """

    start: int
    stop: int
    tag: Tag

    @property
    def length(self) -> int:
        """Tokens of the piece."""
        return self.stop - self.start

    @property
    def is_hot(self) -> bool:
        """Whether the piece lies in a HOT slab."""
        return isinstance(self.tag, Hot)

    def part(self, start: int, stop: int, page_size: int) -> "Piece":
        """The piece cut to positions ``[start, stop)``, which must lie inside it."""
        tag = self.tag.part(start - self.start, stop - self.start, page_size)
        return Piece(start, stop, tag)

    def pages(self, page_size: int) -> np.ndarray:
        """Pages of the piece in token order, int32 ``[length // page_size]``."""
        return self.tag.page_ids(self.length, page_size)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A run of tokens that every sequence below it shares. Only the index writes its fields.

    Attributes:
      id: unique for the life of the index. A split keeps the id with the later half, so a lock
        handle always stands for the tokens up to its end.
      parent: ``None`` for the root and for a node that has left the tree.
      start: position of the first token, a multiple of the page size.
      tokens: int32 ``[length]``, read-only.
      tag: where the KV lie. The root counts as an empty HOT run.
      children: by the bytes of their first page of tokens.
      lock_count: locks on this node and on all nodes below it.
      handles: locks whose handle is this very node.
      hits: requests that have used the node, by locking it or by bringing its tokens.
      last_access: logical clock of the last lock, unlock or insert that went through the node.
      declared: a caller said that the tokens up to the end of this node are a shared prefix.
      hot_children: how many children are HOT.
    """

    id: int
    parent: "Node | None"
    start: int
    tokens: np.ndarray
    tag: Tag
    children: dict[bytes, "Node"] = dataclasses.field(default_factory=dict)
    lock_count: int = 0
    handles: int = 0
    hits: int = 0
    last_access: int = 0
    declared: bool = False
    hot_children: int = 0

    @property
    def length(self) -> int:
        """Tokens of the node."""
        return self.tokens.size

    @property
    def end(self) -> int:
        """Position behind the last token: how long the prefix is that ends here."""
        return self.start + self.tokens.size

    @property
    def is_hot(self) -> bool:
        """Whether the node lies in a HOT slab (the root does, as an empty run)."""
        return isinstance(self.tag, Hot)

    @property
    def is_prefix(self) -> bool:
        """Whether the node is a shared prefix: declared as one, or used by two requests."""
        return self.declared or self.hits >= 2

    @property
    def piece(self) -> Piece:
        """Positions and tag of the node."""
        return Piece(self.start, self.end, self.tag)

    def pages(self, page_size: int) -> np.ndarray:
        """Pages of the node in token order, int32 ``[length // page_size]``."""
        return self.tag.page_ids(self.length, page_size)

    def __repr__(self) -> str:
        pool = "HOT" if self.is_hot else "COLD"
        return f"node {self.id} ({pool}, tokens [{self.start}, {self.end}))"


def hot_evictable(node: Node) -> bool:
    """Whether a HOT node may go: in the tree, unlocked, and last of its HOT chain."""
    return (
        node.is_hot and node.parent is not None and node.lock_count == 0 and node.hot_children == 0
    )


def cold_evictable(node: Node) -> bool:
    """Whether a COLD node may go: in the tree, unlocked, and a leaf."""
    return (
        not node.is_hot and node.parent is not None and node.lock_count == 0 and not node.children
    )


@dataclasses.dataclass(frozen=True)
class Size:
    """What the index holds. Everything unlocked can be evicted, by and by.

    Attributes:
      nodes: nodes besides the root.
      hot_tokens: tokens in HOT nodes.
      cold_pages: pages in COLD nodes.
      locked_tokens: tokens in locked nodes of both pools.
      prefix_tokens: tokens in nodes that are shared prefixes, each counted once.
      evictable_hot_tokens: tokens in unlocked HOT nodes.
      evictable_cold_pages: pages in unlocked COLD nodes.
    """

    nodes: int = 0
    hot_tokens: int = 0
    cold_pages: int = 0
    locked_tokens: int = 0
    prefix_tokens: int = 0
    evictable_hot_tokens: int = 0
    evictable_cold_pages: int = 0

    def plus(self, node: Node, page_size: int, sign: int = 1) -> "Size":
        """The size with ``node`` counted once more (``sign=1``) or once less (``-1``)."""
        hot = sign * node.length if node.is_hot else 0
        cold = 0 if node.is_hot else sign * (node.length // page_size)
        locked = node.lock_count > 0
        return Size(
            nodes=self.nodes + sign,
            hot_tokens=self.hot_tokens + hot,
            cold_pages=self.cold_pages + cold,
            locked_tokens=self.locked_tokens + sign * node.length * locked,
            prefix_tokens=self.prefix_tokens + sign * node.length * node.is_prefix,
            evictable_hot_tokens=self.evictable_hot_tokens + hot * (not locked),
            evictable_cold_pages=self.evictable_cold_pages + cold * (not locked),
        )
