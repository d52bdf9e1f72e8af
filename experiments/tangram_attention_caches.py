"""Caches to time decode attention on: enter a profile and a cell, leave budgets, tables, split tables.

Two layouts hold the same number of tokens. In ``heads`` every KV head has its budget, and heads of
similar budgets share the pages of a group; in ``uniform`` all heads have the same budget, and a page
holds all heads of a layer. Both are read by the same kernel, so what differs is how long the heads are and
where they lie.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.head_stability import read_published
from kvgrain_jax.budgets import (
    BudgetPlan,
    HeadGroups,
    group_pages,
    load_profile,
    make_groups,
    tokens_per_head,
)
from kvgrain_jax.errors import ConfigError
from models import ModelConfig, named_config

SINKS, WINDOW = 4, 28  # protected where there is no profile to say


@dataclasses.dataclass(frozen=True)
class Cell:
    """One decode step to time.

    Attributes:
      context: tokens of each row before compression.
      batch: rows, ``B``.
      retention: share of the tokens that is kept.
    """

    context: int
    batch: int
    retention: float

    def __str__(self) -> str:
        return f"{self.context} tokens, B {self.batch}, {self.retention:.0%} kept"


@dataclasses.dataclass(frozen=True, eq=False)
class Demands:
    """What the heads of a model ask for.

    Attributes:
      model: its sizes.
      name: its name.
      fractions: of the unprotected tokens.
      sinks: protected tokens at the front.
      window: protected tokens at the end.
      source: where the fractions come from, for people.
    """

    model: ModelConfig
    name: str
    fractions: Float[np.ndarray, "L K"]
    sinks: int
    window: int
    source: str

    def budgets(self, cell: Cell) -> Int[np.ndarray, "L K"]:
        """Tokens that each head keeps; together as many as ``uniform_tokens`` for each."""
        plan = BudgetPlan(self.fractions, cell.retention, self.sinks, self.window)
        return plan.budgets(cell.context)

    def uniform_tokens(self, cell: Cell) -> int:
        """Tokens that each head keeps where all keep the same."""
        return tokens_per_head(cell.context, cell.retention, self.sinks + self.window)


def read_demands(name: str, path: str) -> Demands:
    """Demands of a model's heads.

    Args:
      name: of the model, see ``models.NAMED_CONFIGS``.
      path: a profile that ``experiments.head_profile`` wrote, or a published one. Of a model with
        other numbers of layers or heads its fractions are resampled: each layer takes those of the
        layer at the same depth, of as many heads as it has, drawn by a fixed seed. Without a path
        fractions are made up.

    Raises:
      ConfigError: no such model, or the file cannot be read.
    """
    model = named_config(name)
    n_layers, n_kv_heads = model.layers, model.kv_heads
    rng = np.random.default_rng(0)
    if not path:
        made_up = rng.beta(0.6, 1.8, (n_layers, n_kv_heads))
        return Demands(model, name, made_up, SINKS, WINDOW, "made-up fractions, no profile")
    try:
        with np.load(path, allow_pickle=False) as file:
            published = "raw_kept" in file
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a head profile: {error}.") from error
    profile = read_published(path) if published else load_profile(path)
    source = f"{profile.checkpoint}, {profile.scorer}, {len(profile.fractions)} contexts"
    fractions = profile.mean
    if fractions.shape != (n_layers, n_kv_heads):
        source += f", resampled from {profile.n_layers} x {profile.n_kv_heads} heads"
        depth = ((np.arange(n_layers) + 0.5) * profile.n_layers / n_layers).astype(int)
        again = n_kv_heads > profile.n_kv_heads
        fractions = np.stack(
            [rng.choice(fractions[layer], n_kv_heads, replace=again) for layer in depth]
        )
    return Demands(model, name, fractions, profile.sinks, profile.window, source)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the heads of all layers lie in a pool of ``[rows, D]``.

    Attributes:
      groups: the heads that share pages.
      page_size: tokens of a page.
      local: whether the pages of a group lie together, as in a cache of its own for each layer.
    """

    groups: HeadGroups
    page_size: int
    local: bool

    def members(self, layer: int) -> Int[np.ndarray, "n_groups G_h"]:
        """KV head of the layer that each member is, -1 for those of other layers."""
        own = self.groups.members[..., 0] == layer
        return np.where(own, self.groups.members[..., 1], -1).astype(np.int32)

    def rows(self, budgets: Int[np.ndarray, "L K"], batch: int) -> int:
        """Single-head rows of the pages of a batch."""
        pages = int(group_pages(self.groups, budgets, self.page_size).sum())
        return batch * pages * self.page_size * self.groups.group_size

    def tables(
        self, budgets: Int[np.ndarray, "L K"], batch: int, width: int
    ) -> tuple[Int[Array, "B n_groups T"], Int[Array, "B n_groups G_h"]]:
        """Page tables and lengths of rows whose pages were handed out in random order.

        Args:
          budgets: tokens of each head.
          batch: rows, ``B``.
          width: ``T``.
        """
        rng = np.random.default_rng(1)
        pages = group_pages(self.groups, budgets, self.page_size)
        table = np.zeros((batch, len(pages), width), np.int32)
        order = rng.permutation(batch * int(pages.sum())).astype(np.int32)
        first = 0
        for group, n in enumerate(pages.tolist()):
            last = first + batch * n
            own = first + rng.permutation(batch * n) if self.local else order[first:last]
            table[:, group, :n] = own.reshape(batch, n)
            first = last
        lengths = self.groups.by_group(budgets).astype(np.int32)
        return jnp.asarray(table), jnp.asarray(np.broadcast_to(lengths, (batch, *lengths.shape)))


def head_layout(demands: Demands, *, page_size: int, group_size: int, scope: str) -> Layout:
    """Groups of heads of similar demands, the same for every context and retention.

    Raises:
      ConfigError: see ``make_groups``.
    """
    groups = make_groups(demands.fractions, group_size, scope=scope)
    return Layout(groups, page_size, local=False)


def uniform_layout(model: ModelConfig, page_size: int) -> Layout:
    """All heads of a layer in the pages of a cache of that layer."""
    members = np.indices((model.layers, model.kv_heads), np.int32).transpose(1, 2, 0)
    groups = HeadGroups(np.ascontiguousarray(members), model.layers, model.kv_heads)
    return Layout(groups, page_size, local=True)


def plan_on_host(
    lengths: Int[np.ndarray, "B K"], *, n_blocks: int, page_size: int
) -> Int[np.ndarray, "K"]:
    """Splits of a layer as FlashInfer plans them before each run: the smallest chunk with which all
    heads of all rows together make at most ``n_blocks`` parts a row, by bisection.

    Args:
      lengths: tokens of each row and head.
      n_blocks: parts of each row at most, where there are at least as many as heads.
      page_size: tokens of a page; a chunk is whole pages.
    """
    pages = -(-lengths.astype(np.int64) // page_size)
    low, high = 1, max(1, int(pages.max()))
    most = max(n_blocks * len(lengths), lengths.size)
    while low < high:
        chunk = (low + high) // 2
        if np.maximum(-(-pages // chunk), 1).sum() <= most:
            high = chunk
        else:
            low = chunk + 1
    return np.maximum(-(-pages // low), 1).max(axis=0).astype(np.int32)
