"""Head groups: heads of similar budgets that share one page table, and what their pages cost.

Enter the budgets of all heads, leave groups of ``G_h`` heads. A row of a group's page holds one token
of each of its ``G_h`` heads, so a group pays for its largest budget ``G_h`` times; heads of equal
budgets together waste nothing. NumPy at set-up time. Source: Tangram §4.2.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float, Int, Integer

from kvgrain_jax.budgets.budget import share_out
from kvgrain_jax.errors import ConfigError

SCOPES = ("global", "layer")
MAX_GROUP_SIZE = 64


@dataclasses.dataclass(frozen=True, eq=False)
class HeadGroups:
    """A partition of all ``L * K`` KV heads into groups of ``G_h``.

    Attributes:
      members: int32 ``[n_groups, G_h, 2]``: ``(layer, head)`` of each place of each group.
      n_layers: ``L``.
      n_kv_heads: ``K``.
      unified: all groups of a request hold as many pages as the one that needs most, as where one
        page table serves all layers.

    Raises:
      ConfigError: some head is in no group or in two, or does not exist.
    """

    members: Int[np.ndarray, "n_groups G_h 2"]
    n_layers: int
    n_kv_heads: int
    unified: bool = False

    def __post_init__(self):
        layer, head = self.members[..., 0], self.members[..., 1]
        n_heads = self.n_layers * self.n_kv_heads
        inside = (layer >= 0) & (layer < self.n_layers) & (head >= 0) & (head < self.n_kv_heads)
        flat = np.sort((layer.astype(np.int64) * self.n_kv_heads + head).ravel())
        if not inside.all() or not np.array_equal(flat, np.arange(n_heads)):
            raise ConfigError(
                f"The groups do not hold each of {self.n_layers} x {self.n_kv_heads} heads exactly "
                "once."
            )

    @property
    def n_groups(self) -> int:
        return self.members.shape[0]

    @property
    def group_size(self) -> int:
        """``G_h``."""
        return self.members.shape[1]

    @functools.cached_property
    def group_of(self) -> Int[np.ndarray, "L K"]:
        """Group of each head, int32."""
        return self._inverse[..., 0]

    @functools.cached_property
    def place_of(self) -> Int[np.ndarray, "L K"]:
        """Place of each head in its group, int32: which of the ``G_h`` vectors of a row is its."""
        return self._inverse[..., 1]

    @functools.cached_property
    def _inverse(self) -> Int[np.ndarray, "L K 2"]:
        found = np.empty((self.n_layers, self.n_kv_heads, 2), np.int32)
        group, place = np.indices(self.members.shape[:2])
        found[self.members[..., 0], self.members[..., 1]] = np.stack([group, place], axis=-1)
        return found

    def by_group(self, values: Integer[np.ndarray, "L K"]) -> Integer[np.ndarray, "n_groups G_h"]:
        """Values of the heads, in the order of the groups."""
        return values[self.members[..., 0], self.members[..., 1]]


def make_groups(
    sizes: Integer[np.ndarray, "L K"] | Float[np.ndarray, "L K"],
    group_size: int,
    *,
    scope: str = "global",
) -> HeadGroups:
    """Groups of heads that are neighbours when sorted by size; ties by layer, then head.

    Args:
      sizes: budgets or demands of the heads. Demands give groups that hold for every prompt length.
      group_size: ``G_h``, 1 to 64.
      scope: ``"global"`` sorts all heads together, ``"layer"`` keeps groups within a layer.

    Raises:
      ConfigError: ``G_h`` is out of range or does not divide the heads, or the scope is unknown.
    """
    n_layers, n_kv_heads = sizes.shape
    if scope not in SCOPES:
        raise ConfigError(f"The scope of head groups is {scope!r}; choose 'global' or 'layer'.")
    if not 1 <= group_size <= MAX_GROUP_SIZE:
        raise ConfigError(f"G_h is {group_size}; give 1 to {MAX_GROUP_SIZE} heads a group.")
    heads = sizes.size if scope == "global" else n_kv_heads
    if heads % group_size:
        where = "heads of the model" if scope == "global" else "heads of a layer"
        raise ConfigError(f"G_h is {group_size}, which does not divide the {heads} {where}.")
    flat = np.arange(sizes.size)
    keys = (flat, sizes.ravel())
    order = np.lexsort(keys if scope == "global" else (*keys, flat // n_kv_heads))
    members = np.stack([order // n_kv_heads, order % n_kv_heads], axis=-1).astype(np.int32)
    return HeadGroups(members.reshape(-1, group_size, 2), n_layers, n_kv_heads)


def group_pages(
    groups: HeadGroups, budgets: Integer[np.ndarray, "L K"], page_size: int
) -> Int[np.ndarray, " n_groups"]:
    """Pages of each group: its largest budget in whole pages, int64.

    Raises:
      ConfigError: the page size is not positive.
    """
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; give a positive number.")
    pages = -(-groups.by_group(budgets).max(axis=1).astype(np.int64) // page_size)
    return np.full_like(pages, pages.max()) if groups.unified else pages


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What the compressed cache of one request takes, known before it runs: ``M(r)``.

    Attributes:
      pages: pages of all groups together.
      allocated_bytes: keys and values of those pages.
      used_bytes: the part that budgets fill.
    """

    pages: int
    allocated_bytes: int
    used_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share of the allocated bytes that no budget fills."""
        return 1 - self.used_bytes / self.allocated_bytes if self.allocated_bytes else 0.0


def footprint(
    groups: HeadGroups,
    budgets: Integer[np.ndarray, "L K"],
    *,
    page_size: int,
    head_dim: int,
    itemsize: int,
) -> Footprint:
    """``M(r)``: pages of every group's largest budget, keys and values.

    Args:
      groups: the head groups.
      budgets: tokens that each head keeps.
      page_size: rows of a page.
      head_dim: ``D``.
      itemsize: bytes of one number.
    """
    vector = 2 * head_dim * itemsize
    pages = int(group_pages(groups, budgets, page_size).sum())
    return Footprint(
        pages=pages,
        allocated_bytes=pages * page_size * groups.group_size * vector,
        used_bytes=int(budgets.sum()) * vector,
    )


def fill_pages(
    groups: HeadGroups,
    budgets: Integer[np.ndarray, "L K"],
    n: int,
    *,
    page_size: int,
    pages: int,
    least: int = 1,
) -> Int[np.ndarray, "L K"]:
    """Budgets that use ``pages`` whole pages to the last row: equal bytes after page rounding.

    The pages are shared out among the groups in proportion to their mean budgets; none gets more than
    the prompt needs or less than ``least`` tokens do. Every head then keeps as many tokens as its
    group has rows, or the whole prompt.

    Args:
      groups: the head groups.
      budgets: tokens that each head asks for.
      n: tokens of the prompt, at least 1.
      page_size: rows of a page.
      pages: pages of all groups together.
      least: tokens that every head must keep, usually the protected ones; at least 1.

    Raises:
      ConfigError: the pages do not hold ``least`` tokens of every head, or are more than the whole
        prompt fills.
    """
    most, fewest = -(-n // page_size), -(-min(n, least) // page_size)
    if not groups.n_groups * fewest <= pages <= groups.n_groups * most:
        raise ConfigError(
            f"{groups.n_groups} groups take {groups.n_groups * fewest} to {groups.n_groups * most} "
            f"pages of {page_size} for a prompt of {n} tokens, not {pages}."
        )
    wanted = np.maximum(groups.by_group(budgets).mean(axis=1) / page_size - fewest, 0.0)
    got = fewest + share_out(wanted, pages - fewest * groups.n_groups, most - fewest)
    return np.minimum(n, got * page_size)[groups.group_of]
