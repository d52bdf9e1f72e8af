"""The body of the prefix index: nodes come, split and go, and the books follow.

Everything that must agree with the shape of the tree is changed in this module and nowhere else:
child keys, counts, and the lists of what may be evicted.
"""

import itertools
from typing import Any

import numpy as np

from kvgrain_jax.errors import KVGrainError
from kvgrain_jax.prefix.lru import LeastRecent
from kvgrain_jax.prefix.node import Hot, Node, Piece, Size, cold_evictable, hot_evictable


class Tree:
    """Nodes below one root.

    Attributes:
      page_size: tokens of a page; nodes begin and end at multiples of it.
      root: the empty prefix.
      size: counts of the nodes below the root.
      evictable: nodes that may go, by pool, in order of last access.
      clock: logical time; ``tick`` moves it on.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._ids = itertools.count()
        self.root = Node(next(self._ids), None, 0, np.zeros(0, np.int32), Hot(0))
        self.size = Size()
        self.evictable = {"hot": LeastRecent(hot_evictable), "cold": LeastRecent(cold_evictable)}
        self.clock = 0

    def tick(self) -> int:
        """Move the clock on and read it."""
        self.clock += 1
        return self.clock

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root (left out) down to ``node``.

        Raises:
          KVGrainError: the node has been evicted, or belongs to another index.
        """
        nodes = [node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        if nodes.pop() is not self.root:
            raise KVGrainError(f"The index does not hold {node} any more; match again.")
        return nodes[::-1]

    def descend(self, tokens: np.ndarray) -> tuple[Node, int]:
        """The deepest node that the tokens reach, and how many tokens (whole pages) are found."""
        node, position = self.root, 0
        end = tokens.size // self.page_size * self.page_size
        while position < end:
            child = node.children.get(self._key(tokens[position:]))
            if child is None:
                break
            node = child
            length = min(node.length, end - position)
            differ = node.tokens[:length] != tokens[position : position + length]
            common = int(differ.argmax()) if differ.any() else length
            position += common // self.page_size * self.page_size
            if position < node.end:
                break
        return node, position

    def update(self, node: Node, **fields: Any) -> None:
        """Set fields of a node so that counts follow, and list it if it has become evictable."""
        self._count(node, -1)
        for name, value in fields.items():
            setattr(node, name, value)
        self._count(node, +1)
        self._offer(node)

    def boundary(self, node: Node, position: int) -> Node:
        """The node of the path to ``node`` that ends at ``position``, split off if need be."""
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node if node.end == position else self._split(node, position - node.start)

    def attach(self, parent: Node, tokens: np.ndarray, piece: Piece, declared: bool) -> Node:
        """Hang a new node below ``parent``; ``tokens`` are those of the piece."""
        node = Node(next(self._ids), parent, piece.start, tokens, piece.tag)
        node.hits, node.last_access, node.declared = 1, self.clock, declared
        parent.children[self._key(tokens)] = node
        parent.hot_children += node.is_hot
        self._count(node, +1)
        self._offer(node)
        return node

    def detach(self, top: Node) -> list[Piece]:
        """Take out a node with all that is below it; its own piece comes first in the result."""
        parent = top.parent
        assert parent is not None, "the root stays"
        del parent.children[self._key(top.tokens)]
        parent.hot_children -= top.is_hot
        gone: list[Piece] = []
        stack = [top]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            gone.append(node.piece)
            self._count(node, -1)
            node.parent, node.children, node.hot_children = None, {}, 0
            for order in self.evictable.values():
                order.forget(node)
        self._offer(parent)
        return gone

    def _split(self, node: Node, length: int) -> Node:
        """Part the first ``length`` tokens from a node; it keeps the others, its id and handles."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        upper = Node(
            id=next(self._ids),
            parent=parent,
            start=node.start,
            tokens=node.tokens[:length],
            tag=node.tag.part(0, length, self.page_size),
            children={self._key(node.tokens[length:]): node},
            lock_count=node.lock_count,
            hits=node.hits,
            last_access=node.last_access,
            declared=node.declared,
            hot_children=int(node.is_hot),
        )
        parent.children[self._key(upper.tokens)] = upper
        self._count(node, -1)
        node.tag = node.tag.part(length, node.length, self.page_size)
        node.parent, node.start, node.tokens = upper, upper.end, node.tokens[length:]
        self._count(upper, +1)
        self._count(node, +1)
        return upper

    def _key(self, tokens: np.ndarray) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _count(self, node: Node, sign: int) -> None:
        if node is not self.root:
            self.size = self.size.plus(node, self.page_size, sign)

    def _offer(self, node: Node) -> None:
        for order in self.evictable.values():
            order.offer(node)
