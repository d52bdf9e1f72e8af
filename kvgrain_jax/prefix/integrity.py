"""Does the prefix index agree with itself? Everything is recomputed from the nodes alone."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvgrain_jax.errors import PoolCorrupted
from kvgrain_jax.prefix.node import Cold, Hot, Node, Size, cold_evictable, hot_evictable
from kvgrain_jax.prefix.tree import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Owned:
    """The slots that the index owns; everything else is free or a request's.

    Attributes:
      hot: int64 ``[n, 2]``: base and length in slots of each HOT node, by base.
      cold: int32 ``[m]``: pages of the COLD nodes, ascending.
    """

    hot: np.ndarray
    cold: np.ndarray


def check(tree: Tree) -> Owned:
    """Check the whole tree.

    Returns:
      The slots that its nodes own.

    Raises:
      PoolCorrupted: something does not agree; the message says what and where.
    """
    nodes = list(_walk(tree.root))
    _check_root(tree.root)
    for node in nodes:
        _check_shape(node, tree.page_size)
        _check_tag(node, tree.page_size)
    for node in (tree.root, *nodes):
        _check_counts(node)
    size = Size()
    for node in nodes:
        size = size.plus(node, tree.page_size)
    if size != tree.size:
        raise PoolCorrupted(f"The index counts {tree.size}; its nodes add up to {size}.")
    for pool, evictable in (("hot", hot_evictable), ("cold", cold_evictable)):
        for node in nodes:
            if evictable(node) and not tree.evictable[pool].holds(node):
                raise PoolCorrupted(f"The {node} could be evicted, but is not listed as such.")
    if len({node.id for node in nodes}) != len(nodes):
        raise PoolCorrupted("Two nodes have the same id.")
    _check_owners(nodes, tree.page_size)
    hot = [(node.tag.base, node.length) for node in nodes if isinstance(node.tag, Hot)]
    cold = [node.tag.pages for node in nodes if isinstance(node.tag, Cold)]
    return Owned(
        np.array(sorted(hot), np.int64).reshape(-1, 2),
        np.sort(np.concatenate([np.zeros(0, np.int32), *cold])),
    )


def _walk(root: Node) -> Iterator[Node]:
    seen = {id(root)}
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        if id(node) in seen:
            raise PoolCorrupted(f"The {node} hangs in two places of the tree.")
        seen.add(id(node))
        stack += node.children.values()
        yield node


def _check_root(root: Node) -> None:
    if root.parent is not None or root.end != 0 or not root.is_hot:
        raise PoolCorrupted("The root is not an empty HOT run without a parent.")
    _check_children(root)


def _check_children(node: Node) -> None:
    for child in node.children.values():
        if child.parent is not node:
            raise PoolCorrupted(f"The {child} hangs below {node}, but names {child.parent}.")
    hot = sum(child.is_hot for child in node.children.values())
    if hot != node.hot_children:
        raise PoolCorrupted(f"The {node} counts {node.hot_children} HOT children; it has {hot}.")


def _check_shape(node: Node, page_size: int) -> None:
    parent = node.parent
    if parent is None:
        raise PoolCorrupted(f"The {node} is in the tree, but names no parent.")
    _check_children(node)
    key = node.tokens[:page_size].tobytes()
    if parent.children.get(key) is not node:
        raise PoolCorrupted(f"The {node} is not below {parent} under its first page of tokens.")
    if node.start != parent.end:
        raise PoolCorrupted(f"The {node} begins at {node.start}; its parent ends at {parent.end}.")
    if node.length == 0 or node.length % page_size:
        raise PoolCorrupted(f"The {node} holds no whole number of pages of {page_size} tokens.")


def _check_tag(node: Node, page_size: int) -> None:
    if isinstance(node.tag, Hot):
        if node.tag.base < 0 or node.tag.base % page_size:
            raise PoolCorrupted(f"The {node} lies at slot {node.tag.base}, not at a page.")
        if node.parent is not None and not node.parent.is_hot:
            raise PoolCorrupted(f"The {node} lies below {node.parent}, which is COLD.")
    elif node.tag.pages.size * page_size != node.length:
        raise PoolCorrupted(
            f"The {node} holds {node.length} tokens in {node.tag.pages.size} pages of {page_size}."
        )


def _check_counts(node: Node) -> None:
    below = sum(child.lock_count for child in node.children.values())
    if node.handles < 0 or node.lock_count != node.handles + below:
        raise PoolCorrupted(
            f"The {node} is locked {node.lock_count} times, but has {node.handles} handles and "
            f"{below} locks below it."
        )
    for child in node.children.values():
        if child.last_access > node.last_access:
            raise PoolCorrupted(f"The {child} was used after {node}, through which it is reached.")
        if child.declared and node.parent is not None and not node.declared:
            raise PoolCorrupted(f"The {child} is a declared prefix, but {node} above it is not.")


def _check_owners(nodes: list[Node], page_size: int) -> None:
    if not nodes:
        return
    pages = [node.pages(page_size) for node in nodes]
    owners = np.repeat(np.arange(len(nodes)), [part.size for part in pages])
    everything = np.concatenate(pages)
    order = np.argsort(everything, kind="stable")
    twice = np.flatnonzero(everything[order][1:] == everything[order][:-1])
    if twice.size:
        first, second = order[twice[0]], order[twice[0] + 1]
        raise PoolCorrupted(
            f"Page {everything[first]} is owned by {nodes[owners[first]]} and by "
            f"{nodes[owners[second]]}."
        )
