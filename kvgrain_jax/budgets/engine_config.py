"""Configuration of the engine over head groups."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvgrain_jax.attention.plan import KernelShape
from kvgrain_jax.budgets.budget import BudgetPlan
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.groups import HeadGroups
from kvgrain_jax.budgets.partition import SplitTable, even_partition, partition
from kvgrain_jax.budgets.pool import HeadPoolGeometry
from kvgrain_jax.budgets.turns import FLOORS, TURN_POLICIES
from kvgrain_jax.engine.model import Model
from kvgrain_jax.errors import ConfigError

# Blocks that a multiprocessor runs at once: four warps and their tiles each.
BLOCKS_PER_WORKER = 4
DEFAULT_SCORER = ChunkScorer()


@dataclasses.dataclass(frozen=True)
class HeadEngineConfig:
    """Everything that shapes the pool and the programs of the engine over head groups.

    Attributes:
      pool_bytes: bytes of the keys and values of the pool.
      page_size: rows of a page.
      scorer: which tokens of a prompt stay.
      hot_bytes: bytes of the pool, in whole pages, that hold slabs of shared prefixes. A prefix
        that a request declares (``Request.shared_tokens``) is compressed once for all its sharers;
        with 0 every request computes its own.
      slab_align: heads in a slab begin at a multiple of so many rows (the kernels' KV tile).
      greedy: serve greedy requests only: no program then has a branch for drawing tokens, for which
        a GPU waits for the host.
      turns: what later turns of a conversation keep, see ``kvgrain_jax.budgets.turns``.
      patience: turns of conversations whose pages are still there that may go before a request which
        would drop them; 0 is first come, first served.
      floors: what a head may hold while its prompt is computed, see ``SpanPlan.held``.
      n_blocks: blocks of the decode kernel that the device runs at once, which the rows of a batch
        share: the split table is made for them. None asks the device; 0 cuts nothing.
      balance: ``"budgets"`` cuts heads in proportion to their budgets (Tangram's Algorithm 1),
        ``"even"`` all into as many parts.
      max_context: tokens of one request or conversation; the model's own where None.
      max_batch: requests that run at once.
      batch_buckets: row counts the decode loop is compiled for, ascending; ``(max_batch,)`` where
        empty.
      chunk_tokens: prompt tokens of one prefill call, of one request.
      chunk_buckets: sizes the prefill is compiled for, ascending; ``(chunk_tokens,)`` where empty.
      decode_steps: decode steps between two looks of the host.
      prefill_decode_steps: the same while prompts are still to be computed.
      kv_dtype: dtype of keys and values.

    Raises:
      ConfigError: a value is out of range.
    """

    pool_bytes: int
    page_size: int = 16
    scorer: ChunkScorer = DEFAULT_SCORER
    hot_bytes: int = 0
    slab_align: int = 64
    greedy: bool = False
    turns: str = "first_prompt_only"
    patience: int = 64
    floors: str = "final"
    n_blocks: int | None = None
    balance: str = "budgets"
    max_context: int | None = None
    max_batch: int = 8
    batch_buckets: tuple[int, ...] = ()
    chunk_tokens: int = 1024
    chunk_buckets: tuple[int, ...] = ()
    decode_steps: int = 8
    prefill_decode_steps: int = 1
    kv_dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        positive = ("max_batch", "chunk_tokens", "decode_steps", "prefill_decode_steps")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1.")
        if self.max_context is not None and self.max_context < 1:
            raise ConfigError(f"max_context is {self.max_context}; give at least 1.")
        if self.n_blocks is not None and self.n_blocks < 0:
            raise ConfigError(f"n_blocks is {self.n_blocks}; give a number of blocks, or 0.")
        if self.patience < 0:
            raise ConfigError(f"patience is {self.patience}; give a number of requests, or 0.")
        for name, options in (
            ("turns", TURN_POLICIES),
            ("floors", FLOORS),
            ("balance", ("budgets", "even")),
        ):
            if getattr(self, name) not in options:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(options)}."
                )
        for name, top in (("batch_buckets", self.max_batch), ("chunk_buckets", self.chunk_tokens)):
            buckets = getattr(self, name) or (top,)
            if list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] != top:
                raise ConfigError(f"{name} is {buckets}; give ascending sizes that end with {top}.")
            object.__setattr__(self, name, tuple(buckets))

    def geometry(self, model: Model, groups: HeadGroups) -> HeadPoolGeometry:
        """The pool of this configuration for a model and its head groups.

        Raises:
          ConfigError: the sizes do not fit together.
        """
        geometry = HeadPoolGeometry.from_bytes(
            self.pool_bytes,
            group_size=groups.group_size,
            head_dim=model.head_dim,
            page_size=self.page_size,
            slab_align=self.slab_align,
            dtype=self.kv_dtype,
        )
        return dataclasses.replace(geometry, n_hot_pages=self.hot_bytes // geometry.page_bytes)

    def row_blocks(self, n_rows: int, kernels: KernelShape | None) -> int:
        """Blocks of the decode kernel for each of ``n_rows`` rows; 0 where nothing is cut.

        Args:
          n_rows: rows of the batch.
          kernels: shape that the GPU kernels are scheduled for, if they run.
        """
        n_blocks = self.n_blocks
        if n_blocks is None:
            n_blocks = BLOCKS_PER_WORKER * kernels.n_workers if kernels else 0
        return n_blocks if n_blocks == 0 else max(1, n_blocks // n_rows)

    def splits(self, plan: BudgetPlan, n_tokens: int, n_blocks: int) -> SplitTable | None:
        """The split table of one row for contexts of about ``n_tokens`` tokens; None cuts nothing."""
        if n_blocks == 0:
            return None
        cut = partition if self.balance == "budgets" else even_partition
        return cut(plan.budgets(n_tokens), n_blocks=n_blocks, page_size=self.page_size)
