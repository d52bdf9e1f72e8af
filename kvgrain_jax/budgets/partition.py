"""Ahead-of-time load balancing: into how many blocks the decode kernel splits each head's tokens.

Enter the lengths of all heads and the number of blocks that the device runs at once; leaves a static
table. Nothing is planned while decoding. NumPy at set-up time. Source: Tangram §4.3, Algorithm 1.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, Integer

from kvgrain_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class SplitTable:
    """Splits of every KV head.

    A head of ``b`` tokens in ``s`` splits gives each split ``ceil(pages / s)`` pages, the last ones
    fewer or none.

    Attributes:
      splits: int32 ``[L, K]``, at least 1.
      page_size: tokens of a page; a split is whole pages.

    Raises:
      ConfigError: a head has no split.
    """

    splits: Int[np.ndarray, "L K"]
    page_size: int

    def __post_init__(self):
        if self.splits.min() < 1:
            raise ConfigError("The split table gives a head no split; give at least 1.")

    @property
    def max_splits(self) -> int:
        """Splits of the head that has most."""
        return int(self.splits.max())

    def blocks(self) -> Int[np.ndarray, " L"]:
        """Blocks that one row of the batch launches in each layer."""
        return self.splits.sum(axis=1)

    def block_tokens(self, lengths: Integer[np.ndarray, "L K"]) -> Int[np.ndarray, "L K"]:
        """Tokens of the largest split of each head."""
        pages = -(-lengths.astype(np.int64) // self.page_size)
        return np.minimum(-(-pages // self.splits) * self.page_size, lengths)

    def imbalance(self, lengths: Integer[np.ndarray, "L K"]) -> float:
        """Largest block over mean block, tokens, worst layer: 1 is perfect balance."""
        mean = lengths.sum(axis=1) / self.blocks()
        largest = self.block_tokens(lengths).max(axis=1)
        return float(np.max(largest / np.maximum(mean, 1e-9), where=mean > 0, initial=1.0))


def partition(
    lengths: Integer[np.ndarray, "L K"], *, n_blocks: int, page_size: int = 1
) -> SplitTable:
    """Splits proportional to length, for each layer on its own (Algorithm 1).

    With ``tau = max(1, ceil(sum(lengths[l]) / n_blocks))`` a head gets
    ``max(1, ceil(lengths[l, h] / tau))`` splits, and never more than it has pages. A layer launches
    at most ``n_blocks + K`` blocks.

    Args:
      lengths: tokens that the kernel walks for each head: its budget, or its group's largest where
        members share the length of the group.
      n_blocks: blocks that the device runs at once, for one row of the batch.
      page_size: tokens of a page.

    Raises:
      ConfigError: a length is negative, or ``n_blocks`` or the page size is not positive.
    """
    _check(lengths, n_blocks, page_size)
    lengths = lengths.astype(np.int64)
    tau = np.maximum(1, -(-lengths.sum(axis=1, keepdims=True) // n_blocks))
    pages = -(-lengths // page_size)
    splits = np.clip(-(-lengths // tau), 1, np.maximum(pages, 1))
    return SplitTable(splits.astype(np.int32), page_size)


def even_partition(
    lengths: Integer[np.ndarray, "L K"], *, n_blocks: int, page_size: int = 1
) -> SplitTable:
    """The same number of splits for every head: FlashDecoding's static heuristic.

    Args:
      lengths: as for ``partition``.
      n_blocks: as for ``partition``.
      page_size: tokens of a page.

    Raises:
      ConfigError: as ``partition``.
    """
    _check(lengths, n_blocks, page_size)
    most = max(1, -(-int(lengths.max()) // page_size))
    splits = min(max(1, n_blocks // lengths.shape[1]), most)
    return SplitTable(np.full(lengths.shape, splits, np.int32), page_size)


def _check(lengths: Integer[np.ndarray, "L K"], n_blocks: int, page_size: int) -> None:
    if n_blocks < 1 or page_size < 1:
        raise ConfigError(
            f"n_blocks is {n_blocks} and page_size {page_size}; both must be positive."
        )
    if lengths.min() < 0:
        raise ConfigError(f"A head has {lengths.min()} tokens; lengths cannot be negative.")
