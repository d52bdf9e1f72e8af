"""The caches of one model on the device, and what each method makes of them: enters a cell and the name of
a method, leave the arrays of a program.

Methods are those of ``tangram_attention``.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_cases import multiprocessors
from experiments.kernel_timing import normal
from experiments.tangram_attention_caches import (
    Cell,
    Demands,
    Layout,
    head_layout,
    plan_on_host,
    read_demands,
    uniform_layout,
)
from kvgrain_jax.budgets import SplitTable, even_partition, partition
from kvgrain_jax.errors import ConfigError
from pallas_kernels.head_group_decode import layer_work

CUTS: dict[str, Callable[..., SplitTable]] = {
    "uniform": even_partition,
    "static": even_partition,
    "aot": partition,
}
OTHERS = ("planned", "split_kv")
IMPLEMENTATIONS = ("auto", "triton", "mosaic", "xla")
POOL_BLOCK = 1 << 18  # rows of random values, repeated through the pool


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to attend.

    Attributes:
      kind: ``uniform``, ``static``, ``planned``, ``aot`` or ``split_kv``.
      implementation: of its kernel.
    """

    kind: str
    implementation: str

    @property
    def layout(self) -> str:
        """The layout that it reads."""
        return "uniform" if self.kind in ("uniform", "split_kv") else "heads"

    @property
    def program(self) -> tuple[bool, str, str]:
        """What tells programs apart: methods of one kernel and one layout share one."""
        return self.kind == "split_kv", self.layout, self.implementation


def parse_method(name: str) -> Method:
    """A method of a config: ``aot``, or ``aot:mosaic`` with the implementation.

    Raises:
      ConfigError: there is none of this name.
    """
    kind, _, implementation = name.partition(":")
    method = Method(kind, implementation or "auto")
    if kind not in (*CUTS, *OTHERS) or method.implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"{name!r} is no method; choose among {', '.join((*CUTS, *OTHERS))}, with one of "
            f"{', '.join(IMPLEMENTATIONS)} behind a colon if need be."
        )
    return method


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """One model's caches on the device.

    Attributes:
      demands: of its heads.
      layouts: ``heads`` and ``uniform``.
      k: keys, ``[rows, D]``; both layouts read the same array.
      v: values.
      width: pages of a group's table, ``T``.
      n_blocks: parts of each layer, all rows together.
    """

    demands: Demands
    layouts: Mapping[str, Layout]
    k: jax.Array
    v: jax.Array
    width: int
    n_blocks: int

    def budgets(self, cell: Cell, method: Method) -> np.ndarray:
        """Tokens of each head in the layout of a method."""
        if method.layout == "heads":
            return self.demands.budgets(cell)
        shape = self.demands.fractions.shape
        return np.full(shape, self.demands.uniform_tokens(cell), np.int64)

    def row_blocks(self, batch: int) -> int:
        """Parts of one row in a layer, at least one for each head."""
        return max(self.demands.model.kv_heads, self.n_blocks // batch)

    def splits(self, cell: Cell, method: Method) -> np.ndarray | None:
        """Parts of each head, int32 ``[L, K]``; None where the kernel cuts by its own rule."""
        if method.kind == "split_kv":
            return None
        budgets = self.budgets(cell, method)
        options = {
            "n_blocks": self.row_blocks(cell.batch),
            "page_size": self.layouts["heads"].page_size,
        }
        if method.kind == "planned":
            rows = (np.broadcast_to(own, (cell.batch, len(own))) for own in budgets)
            return np.stack([plan_on_host(lengths, **options) for lengths in rows])
        if method.kind == "aot":
            # Algorithm 1 rounds up for each head; all parts shall run at once nevertheless.
            options["n_blocks"] = max(1, options["n_blocks"] - budgets.shape[1])
        return CUTS[method.kind](budgets, **options).splits

    def work_lists(
        self, cell: Cell, method: Method, splits: np.ndarray | None
    ) -> list[tuple[Any, ...]]:
        """Fields of each layer's ``DecodeWork``, of one size whatever the method; on the host."""
        layout, model = self.layouts[method.layout], self.demands.model
        most = max(self.row_blocks(cell.batch), 2 * model.kv_heads)
        works = [
            layer_work(
                layout.members(layer),
                tuple(own.tolist()),
                n_rows=cell.batch,
                n_heads=model.heads,
                n_entries=most,
                width=most,
            )
            for layer, own in enumerate(() if splits is None else splits)
        ]
        return [(work.entries, work.places, work.counts) for work in works]

    def args(self, cell: Cell, method: Method, splits: np.ndarray | None) -> tuple[Any, ...]:
        """Arrays of the program that attends with a method."""
        model = self.demands.model
        budgets = self.budgets(cell, method)
        tables = self.layouts[method.layout].tables(budgets, cell.batch, self.width)
        q = normal(3, (cell.batch, model.heads, model.head_dim), self.k.dtype)
        lists = jax.device_put(self.work_lists(cell, method, splits))
        return q, self.k, self.v, *tables, lists


def make_bench(name: str, config: Mapping[str, Any], cells: Sequence[Cell]) -> Bench:
    """Caches large enough for each of the cells, one at a time.

    Raises:
      ConfigError: the profile or the sizes are wrong.
    """
    demands = read_demands(name, config["profile"])
    sizes = {field: config[field] for field in ("page_size", "group_size", "scope")}
    layouts = {
        "heads": head_layout(demands, **sizes),
        "uniform": uniform_layout(demands.model, config["page_size"]),
    }
    pools = jnp.zeros((0, demands.model.head_dim), config["dtype"])
    n_blocks = config["blocks_per_processor"] * multiprocessors()
    width = max(-(-cell.context // config["page_size"]) for cell in cells)
    bench = Bench(demands, layouts, pools, pools, width, n_blocks)
    rows = max(
        layouts[method.layout].rows(bench.budgets(cell, method), cell.batch)
        for cell in cells
        for method in map(parse_method, config["methods"])
    )
    step = math.lcm(config["group_size"], demands.model.kv_heads) * config["page_size"]
    rows = -(-rows // step) * step
    k, v = (_fill(seed, rows, pools) for seed in (1, 2))
    return dataclasses.replace(bench, k=k, v=v)


def shape_of_work(budgets: np.ndarray, splits: np.ndarray, page_size: int) -> dict[str, Any]:
    """Largest part over mean part, and the parts, of the layer where it is worst."""
    table = SplitTable(splits, page_size)
    largest = table.block_tokens(budgets)
    ratio = largest.max(axis=1) / (budgets.sum(axis=1) / table.blocks())
    layer = int(np.argmax(ratio))
    parts = []
    for tokens, size, n in zip(budgets[layer], largest[layer], splits[layer], strict=True):
        parts += [int(np.clip(tokens - part * size, 0, size)) for part in range(n)]
    return {"imbalance": float(ratio[layer]), "layer": layer, "parts": parts}


@partial(jax.jit, static_argnums=(0, 1))
def _fill(seed: int, rows: int, like: jax.Array) -> jax.Array:
    block = normal(seed, (min(POOL_BLOCK, rows), like.shape[1]), like.dtype)
    times = -(-rows // len(block))
    return jnp.broadcast_to(block[None], (times, *block.shape)).reshape(-1, like.shape[1])[:rows]
