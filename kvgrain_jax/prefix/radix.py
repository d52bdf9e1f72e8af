"""The prefix index: which token prefixes are cached, in which pool, and who is using them.

Token ids and the places of their KV enter; handles, page tables and places to be freed leave. The
index owns the slots of every run of tokens in it, but allocates and frees nothing itself: what it
gives up is returned, and the caller hands it to the pool. It is a radix tree whose nodes begin and
end at multiples of the page size and carry a pool tag each (RadixAttention: Zheng et al. 2024,
with the tags of GraniKV, section 3.4). HOT nodes form its top: the parent of a HOT node is HOT or
the root.

The life of a request::

    match(prompt)  ->  lock(match)  ->  insert(prompt, pieces)  ->  extend(handle, node)  ->  unlock
    read-only          pins the         its computed tokens         pins those as well
                       cached part      become the index's
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvgrain_jax.errors import ConfigError, KVGrainError
from kvgrain_jax.prefix import checks, integrity
from kvgrain_jax.prefix.node import Cold, Hot, Node, Piece, Size
from kvgrain_jax.prefix.pieces import Duplicate, cut, duplicates
from kvgrain_jax.prefix.tree import Tree


@dataclass(frozen=True, eq=False)
class Match:
    """The longest cached prefix of some tokens.

    Attributes:
      node: the deepest node of the prefix; the root if nothing is cached.
      length: tokens of the prefix, a multiple of the page size.
      node_tokens: how many of the node's tokens are part of it; the last ones may not be.
    """

    node: Node
    length: int
    node_tokens: int


@dataclass(frozen=True, eq=False)
class Inserted:
    """What became of inserted tokens.

    Attributes:
      node: ends with the last of the tokens that the index now holds.
      duplicates: parts that the index had before, in order of position.
      rejected: the tail that could not be taken, since it begins with a HOT piece that would lie
        below a COLD node. It is still the caller's; empty in the ordinary case.
    """

    node: Node
    duplicates: tuple[Duplicate, ...]
    rejected: tuple[Piece, ...]


class HotRange(NamedTuple):
    """Slots ``[base, base + length)`` of one HOT node, and whether evictions can free them."""

    base: int
    length: int
    evictable: bool


class RadixIndex:
    """A radix tree over token ids with pool tags, locks and eviction in LRU order.

    Nodes are handed out to be read; only these verbs change them. A call that raises has changed
    nothing.

    Args:
      page_size: tokens of a COLD page, at least 1. Prefixes are cached in whole pages.

    Raises:
      ConfigError: the page size is below 1.
    """

    def __init__(self, page_size: int = 1):
        if page_size < 1:
            raise ConfigError(f"The page size is {page_size}; give at least 1 token.")
        self.page_size = page_size
        self._tree = Tree(page_size)

    @property
    def root(self) -> Node:
        """The node of the empty prefix, which never leaves."""
        return self._tree.root

    def size(self) -> Size:
        """Counts of nodes, tokens and pages; kept as the tree changes, so this is O(1)."""
        return self._tree.size

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root (left out) down to ``node``.

        Raises:
          KVGrainError: the node has been evicted, or belongs to another index.
        """
        return self._tree.path(node)

    def pages(self, node: Node) -> np.ndarray:
        """Page table of the prefix that ends with ``node``, int32 ``[node.end // page_size]``.

        Raises:
          KVGrainError: the node has been evicted, or belongs to another index.
        """
        parts = [part.pages(self.page_size) for part in self.path(node)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def match(self, tokens: np.ndarray | Sequence[int], limit: int | None = None) -> Match:
        """Find the longest cached prefix. Changes nothing, not even the LRU order.

        The result may be locked as long as its node is in the tree, whatever else is inserted,
        locked or split meanwhile.

        Args:
          tokens: token ids ``[n]``.
          limit: match at most so many tokens. A prompt of ``n`` tokens is matched with
            ``limit=n - 1``, since its last token must be computed to get logits.

        Raises:
          RequestError: the tokens are no token ids, or the limit is negative.
        """
        tokens = checks.token_ids(tokens)
        if limit is not None:
            tokens = tokens[: checks.leading("limit", limit, tokens.size, self.page_size)]
        node, length = self._tree.descend(tokens)
        return Match(node, length, length - node.start)

    def lock(self, match: Match) -> Node:
        """Pin a matched prefix and count a use of it. The handle is for ``unlock`` or ``extend``.

        If only part of the deepest node matched, the node is split first, so the rest of it is
        not pinned. The handle stays valid, and stands for the same tokens, through later splits.

        Raises:
          KVGrainError: the match's node has been evicted; match again.
        """
        self.path(match.node)
        handle = self._tree.boundary(match.node, match.length)
        now = self._tree.tick()
        for node in (self.root, *self.path(handle)):
            locks, hits = node.lock_count + 1, node.hits + 1
            self._tree.update(node, lock_count=locks, hits=hits, last_access=now)
        handle.handles += 1
        return handle

    def extend(self, handle: Node, node: Node) -> Node:
        """Move a lock down to ``node`` and return the new handle; the old one is used up.

        For a request whose own tokens were inserted behind its locked prefix. No use is counted:
        ``insert`` has done so.

        Raises:
          KVGrainError: ``handle`` holds no lock, or ``node`` does not continue it.
        """
        self._check_handle(handle)
        path = [self.root, *self.path(node)]
        if handle not in path:
            raise KVGrainError(f"Cannot extend a lock from {handle} to {node}, which is not below.")
        for below in path[path.index(handle) + 1 :]:
            self._tree.update(below, lock_count=below.lock_count + 1)
        handle.handles -= 1
        node.handles += 1
        return node

    def unlock(self, handle: Node) -> None:
        """Give a lock back. The prefix counts as used until now, and may be evicted from here on.

        Raises:
          KVGrainError: ``handle`` is no longer in the tree or holds no lock (already unlocked or
            extended, or only nodes below it are locked).
        """
        self._check_handle(handle)
        handle.handles -= 1
        now = self._tree.tick()
        for node in (self.root, *self.path(handle)):
            self._tree.update(node, lock_count=node.lock_count - 1, last_access=now)

    def insert(
        self,
        tokens: np.ndarray | Sequence[int],
        pieces: Sequence[Piece],
        declared: int = 0,
    ) -> Inserted:
        """Hand computed tokens over to the index.

        The index takes the slots of ``pieces`` except where it has the tokens already: there its
        own copy stays, and the caller's comes back in ``duplicates`` (two requests may compute
        one prefix at the same time). Slots that the index owns at that position already are
        neither: passing them again is harmless. New nodes are not locked; ``extend`` the
        request's lock to ``node`` before anything is evicted.

        Args:
          tokens: token ids of the whole sequence ``[n]``, ``n`` a multiple of the page size: a
            page that is still being written is never handed over.
          pieces: where tokens ``[c, n)`` lie, in order and without gaps. Tokens ``[0, c)`` are
            in the index and locked by the caller. Empty if the index has everything.
          declared: how many leading tokens the caller says are a shared prefix; 0 for none. A
            node ends there, at the last full page, and the nodes up to there are ``declared``.

        Raises:
          RequestError: the tokens are no token ids, or ``declared`` is negative.
          KVGrainError: the length is not a multiple of the page size, the pieces do not cover
            ``[c, n)`` or do not fit their tags, or tokens ``[0, c)`` are not in the index.
        """
        tokens = checks.token_ids(tokens)
        checks.pieces(pieces, tokens.size, self.page_size)
        shared = checks.leading("declared", declared, tokens.size, self.page_size)
        start = pieces[0].start if pieces else tokens.size
        deepest, held = self._tree.descend(tokens)
        if held < start:
            raise KVGrainError(
                f"The pieces begin at token {start}, but the index holds only the first {held}; "
                "give the pieces from there on."
            )
        kept = [node.piece for node in self.path(deepest)]
        found = duplicates(kept, pieces, held, self.page_size)

        now = self._tree.tick()
        node = self._tree.boundary(deepest, held)
        if shared <= held:
            self._tree.boundary(node, shared)
        self.root.last_access = now
        for used in self.path(node):
            self._tree.update(
                used,
                hits=used.hits + (used.end > start),
                last_access=now,
                declared=used.declared or used.end <= shared,
            )
        rest = cut(pieces, held, shared, self.page_size)
        fresh = tokens[held:].copy()
        fresh.flags.writeable = False
        while rest and (node.is_hot or not rest[0].is_hot):
            piece = rest.pop(0)
            run = fresh[piece.start - held : piece.stop - held]
            node = self._tree.attach(node, run, piece, declared=piece.stop <= shared)
        return Inserted(node, tuple(found), tuple(rest))

    def promote(self, node: Node, base: int) -> np.ndarray:
        """Note that a COLD node's KV have been copied to slots ``[base, base + length)`` of HOT.

        The node, its locks and its handles stay as they are. A chain is promoted from the top.

        Returns:
          The pages it lay in, int32 ``[length // page_size]``: to be freed as soon as no page
          table of a running request names them.

        Raises:
          KVGrainError: the node is not in the tree or not COLD, its parent is COLD, or ``base``
            is not a multiple of the page size.
        """
        self.path(node)
        checks.hot_base(base, self.page_size)
        if node.is_hot or node.parent is None:
            raise KVGrainError(f"Cannot promote {node}: it is in HOT already.")
        if not node.parent.is_hot:
            raise KVGrainError(f"Cannot promote {node} below {node.parent}; promote that first.")
        pages = node.pages(self.page_size)
        node.parent.hot_children += 1
        self._tree.update(node, tag=Hot(base))
        return pages

    def evict(self, pool: str, needed: int) -> list[Piece]:
        """Evict least recently used nodes until ``needed`` is freed or nothing more can go.

        Args:
          pool: ``"hot"`` or ``"cold"``, see ``evict_one``.
          needed: HOT tokens or COLD pages to free.

        Returns:
          What the index no longer owns, of both pools, to be freed: less than ``needed`` if the
          rest is locked (``size()`` says beforehand how much can go).

        Raises:
          ConfigError: there is no such pool.
        """
        freed: list[Piece] = []
        while needed > 0 and (victim := self.evict_one(pool)):
            freed += victim
            tokens = sum(piece.length for piece in victim if piece.is_hot == (pool == "hot"))
            needed -= tokens if pool == "hot" else tokens // self.page_size
        return freed

    def evict_range(self, first: int, stop: int, needed: int) -> list[Piece]:
        """Evict what lies in the pages ``[first, stop)``, if that frees ``needed`` of them.

        For taking lent pages back. It walks the whole tree, so it is not for every request.

        Args:
          first, stop: range of page numbers.
          needed: pages of the range that are in use; the index must own all of them.

        Returns:
          What the index no longer owns, inside the range and outside; empty, and nothing evicted,
          if a locked node lies in the range or if somebody else owns a page of it.
        """
        inside: list[Node] = []
        owned = 0
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if isinstance(node.tag, Cold):
                pages = node.tag.pages
                count = int(np.count_nonzero((pages >= first) & (pages < stop)))
                if count and node.lock_count:
                    return []
                owned += count
                inside += [node] if count else []
        if owned != needed:
            return []
        freed: list[Piece] = []
        for node in inside:
            if node.parent is not None:  # not gone with a node above it
                freed += self._tree.detach(node)
        return freed

    def evict_one(self, pool: str) -> list[Piece]:
        """Evict the least recently used node of a pool. Locked nodes never go.

        ``"cold"``: an unlocked COLD leaf. ``"hot"``: an unlocked HOT node without HOT children,
        with the COLD nodes below it.

        Returns:
          What the index no longer owns, the node itself first; empty if nothing can go.

        Raises:
          ConfigError: there is no such pool.
        """
        if pool not in self._tree.evictable:
            raise ConfigError(f"There is no pool {pool!r}; evict from 'hot' or 'cold'.")
        node = self._tree.evictable[pool].pop()
        return [] if node is None else self._tree.detach(node)

    def drop_all(self) -> list[Piece]:
        """Empty the index, as after a change of the weights, and return all that it owned.

        Raises:
          KVGrainError: something is locked.
        """
        if self.root.lock_count:
            raise KVGrainError(
                f"{self.root.lock_count} locks are held, so the index cannot be emptied; let the "
                "running requests finish first."
            )
        children = list(self.root.children.values())
        return [piece for node in children for piece in self._tree.detach(node)]

    def hot_ranges(self) -> list[HotRange]:
        """All live HOT ranges, so that a caller can tell before evicting whether a hole results."""
        ranges: list[HotRange] = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.hot_children:
                stack += [child for child in node.children.values() if child.is_hot]
            if node is not self.root and isinstance(node.tag, Hot):
                ranges.append(HotRange(node.tag.base, node.length, node.lock_count == 0))
        return ranges

    def check_integrity(self) -> integrity.Owned:
        """Recompute everything that the tree keeps, and list the slots that it owns.

        Raises:
          PoolCorrupted: something does not agree; the message says what and where.
        """
        return integrity.check(self._tree)

    def _check_handle(self, handle: Node) -> None:
        self.path(handle)
        if handle.handles == 0:
            raise KVGrainError(f"No lock is held on {handle}: it was given back or extended.")
