"""Which node was used least recently, without walking the tree.

A heap that is corrected late: nodes go in when they become evictable, and what has changed since
(used again, locked, gone) is found out when a node comes to the top.
"""

import heapq
from collections.abc import Callable

from kvgrain_jax.prefix.node import Node


class LeastRecent:
    """Evictable nodes in order of their last access; at most one entry for each node.

    Args:
      evictable: whether a node may go now. Whoever makes this true for a node must ``offer`` it.
    """

    def __init__(self, evictable: Callable[[Node], bool]):
        self._evictable = evictable
        self._heap: list[tuple[int, int, Node]] = []
        self._entries: dict[int, int] = {}

    def __len__(self) -> int:
        """Entries held, outdated ones included."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Take the node in if it is evictable and not in already."""
        if node.id not in self._entries and self._evictable(node):
            self._entries[node.id] = node.last_access
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def pop(self) -> Node | None:
        """Take out the evictable node whose last access is longest ago; ``None`` if none is."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if self._entries.pop(node.id, None) is None:
                continue
            # The clock only runs forward, so an outdated entry comes up too early, never too late.
            if key != node.last_access:
                self.offer(node)
            elif self._evictable(node):
                return node
        return None

    def forget(self, node: Node) -> None:
        """Give up a node that has left the tree, so that its memory does not wait for a ``pop``."""
        if self._entries.pop(node.id, None) is not None and len(self._heap) > 2 * len(
            self._entries
        ):
            self._heap = [entry for entry in self._heap if entry[1] in self._entries]
            heapq.heapify(self._heap)

    def holds(self, node: Node) -> bool:
        """Whether the node has an entry that comes up in time."""
        key = self._entries.get(node.id)
        return key is not None and key <= node.last_access
