"""Measures on this device what the dispatch decides by: dense, cascade and paged attention of one layer.

    python -m experiments.dispatch_fit --config=configs/dispatch_fit.py

For each head shape, over a grid of rows and tokens: the prefix pass with wide and with narrow row tiles,
and split-KV decode of the rows' own tokens, each as the decode loop runs it. Prints the threshold
``M_sat`` of the ``meff`` rule for each prefix length, draws the crossover, and with ``--write`` writes the
table of the ``calibrated`` rule for this kind of device into the library.

Fields of a config:
  shapes                  named models, or ``(K, G, D)`` triples.
  dtype                   of queries, keys and values.
  rows, prefix_tokens     grid of the prefix passes, ascending.
  own_tokens              grid of split-KV decode with ``rows``; the first is what rows have of their
                          own while the prefix passes are timed.
  pool_tokens             slots of the pool.
  out                     folder for ``result.json`` and the picture.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import rich.console
import rich.progress
from absl import flags

from experiments import flags as shared_flags
from experiments import report
from experiments.kernel_timing import TimedLoop, compile_all, compile_loop, normal
from experiments.serve import make_console
from kvgrain_jax.attention import (
    DecodePlan,
    Segment,
    decode_attention,
    kernel_shape,
    make_plan,
    row_order,
    write_costs,
)
from kvgrain_jax.errors import ConfigError
from models import NAMED_CONFIGS
from pallas_kernels.tuning import device_name

matplotlib.use("Agg")

import matplotlib.pyplot as plt

FIELDS = ("shapes", "dtype", "rows", "prefix_tokens", "own_tokens", "pool_tokens", "out")
WRITE = flags.DEFINE_bool("write", False, "Write the calibrated table into the library.")
SHARED = ("dense", "cascade")


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Heads of one rank: ``K``, ``G``, ``D``."""

    n_kv_heads: int
    group: int
    head_dim: int


def parse_shape(value: Any) -> HeadShape:
    """A head shape of a config.

    Raises:
      ConfigError: it is no known model and no triple.
    """
    if isinstance(value, str):
        if value not in NAMED_CONFIGS:
            raise ConfigError(f"There is no model {value!r}; known are {', '.join(NAMED_CONFIGS)}.")
        config = NAMED_CONFIGS[value]
        return HeadShape(config.kv_heads, config.heads // config.kv_heads, config.head_dim)
    return HeadShape(*(int(n) for n in value))


class Bench:
    """Programs for one head shape, compiled once for each number of rows and backend."""

    def __init__(self, shape: HeadShape, config: Mapping[str, Any]):
        self.shape, self.config = shape, config
        self.n_slots = config["pool_tokens"]
        self.kernels = kernel_shape(
            shape.n_kv_heads * shape.group, shape.n_kv_heads, shape.head_dim
        )
        pool = (self.n_slots, shape.n_kv_heads, shape.head_dim)
        self.k = normal(1, pool, config["dtype"])
        self.v = normal(2, pool, config["dtype"])
        longest = max(*config["own_tokens"], config["own_tokens"][0])
        rng = np.random.default_rng(0)
        self.own = rng.integers(0, self.n_slots, (max(config["rows"]), longest)).astype(np.int32)
        jobs = {
            (n, b): partial(self._compile, n, b) for n in config["rows"] for b in (*SHARED, "paged")
        }
        self.loops = dict(zip(jobs, compile_all(list(jobs.values())), strict=True))

    def microseconds(self, rows: int, backend: str, prefix: int, own: int) -> float:
        """Time of one layer's attention, in its kernels where the profiler counts them."""
        loop = self.loops[rows, backend]
        if isinstance(loop, Exception):
            raise loop
        loop = dataclasses.replace(loop, args=self._args(rows, prefix, own))
        on_gpu = jax.default_backend() == "gpu"
        return (loop.device_microseconds() if on_gpu else None) or loop.microseconds(5)

    def _compile(self, rows: int, backend: str) -> TimedLoop:
        _, tree = jax.tree.flatten(self._plan(rows, 0))

        def step(turn: int, q, k, v, pages, lengths, *leaves):
            del turn
            plan: DecodePlan = jax.tree.unflatten(tree, leaves)
            return decode_attention(
                q,
                k,
                v,
                plan,
                pages,
                lengths,
                backend=backend,
                page_size=1,
                order=row_order(plan, lengths, backend=backend),
                out_dtype=q.dtype,
            ).out

        prefix = 0 if backend == "paged" else self.config["prefix_tokens"][0]
        args = self._args(rows, prefix, self.config["own_tokens"][0])
        return compile_loop(step, args, runs=8 if jax.default_backend() == "cpu" else 64)

    def _args(self, rows: int, prefix: int, own: int) -> Sequence[Any]:
        heads = self.shape.n_kv_heads * self.shape.group
        # Pages before the row's own are not read by the prefix passes.
        pages = np.zeros((rows, max(self.config["prefix_tokens"]) + self.own.shape[1]), np.int32)
        pages[:, prefix : prefix + own] = self.own[:rows, :own]
        return (
            normal(0, (rows, heads, self.shape.head_dim), self.config["dtype"]),
            self.k,
            self.v,
            jnp.asarray(pages),
            jnp.full(rows, prefix + own, jnp.int32),
            *jax.tree.leaves(self._plan(rows, prefix)),
        )

    def _plan(self, rows: int, prefix: int) -> DecodePlan:
        segments = [Segment(0, prefix, 0, rows)] if prefix else []
        return make_plan(
            segments, n_rows=rows, n_slots=self.n_slots, max_segments=2, kernels=self.kernels
        )


def measure(
    shape: HeadShape, config: Mapping[str, Any], on_cell=lambda name: None
) -> dict[str, dict[str, Any]]:
    """Surfaces ``dense``, ``cascade`` and ``own`` of a head shape, as ``write_costs`` takes them.

    A prefix pass is the whole attention less the decode of the rows' own tokens in it, so it
    includes the merge.
    """
    bench = Bench(shape, config)
    rows, prefixes, owns = config["rows"], config["prefix_tokens"], config["own_tokens"]
    own = []
    for n in rows:
        on_cell(f"{shape}, {n} rows, own tokens")
        own.append([bench.microseconds(n, "paged", 0, tokens) for tokens in owns])
    surfaces = {"own": _surface(rows, owns, own)}
    for backend in SHARED:
        lines = []
        for n, (alone, *_) in zip(rows, own, strict=True):
            on_cell(f"{shape}, {n} rows, {backend}")
            whole = [bench.microseconds(n, backend, prefix, owns[0]) for prefix in prefixes]
            lines.append([max(0.1, us - alone) for us in whole])
        surfaces[backend] = _surface(rows, prefixes, lines)
    return surfaces


def _surface(rows, tokens, lines) -> dict[str, Any]:
    rounded = [[round(us, 2) for us in line] for line in lines]
    return {"rows": list(rows), "tokens": list(tokens), "microseconds": rounded}


def thresholds(shape: HeadShape, surfaces: Mapping[str, Any]) -> dict[int, int | None]:
    """For each prefix length the effective rows from which dense is never slower than cascade."""
    rows, prefixes = surfaces["dense"]["rows"], surfaces["dense"]["tokens"]
    found: dict[int, int | None] = {}
    for column, prefix in enumerate(prefixes):
        wins = [
            dense[column] <= cascade[column]
            for dense, cascade in zip(
                surfaces["dense"]["microseconds"], surfaces["cascade"]["microseconds"], strict=True
            )
        ]
        first = next((i for i in range(len(rows)) if all(wins[i:])), None)
        found[prefix] = None if first is None else rows[first] * shape.group
    return found


def dispatch_fit(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    write: bool = False,
) -> list[dict[str, Any]]:
    """Runs a config.

    Returns:
      One row for each head shape: the shape, the three surfaces, ``m_sat`` by prefix length.

    Raises:
      ConfigError: the config is wrong.
    """
    console = console or make_console()
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    config = dict(config)
    for name in ("rows", "prefix_tokens", "own_tokens"):
        config[name] = [int(n) for n in config[name]]
        if config[name] != sorted(set(config[name])) or config[name][0] < 1:
            raise ConfigError(f"config.{name} is {config[name]}; give ascending positive numbers.")
    if config["pool_tokens"] < max(config["prefix_tokens"]):
        raise ConfigError("config.pool_tokens must hold the longest prefix.")
    shapes = [parse_shape(value) for value in config["shapes"]]
    folder = report.check_out_folder(config["out"])
    rows = []
    with rich.progress.Progress(console=console) as progress:
        task = progress.add_task("compiling", total=len(shapes) * 3 * len(config["rows"]))

        def on_cell(name: str) -> None:
            progress.update(task, description=name, advance=1)

        for shape in shapes:
            surfaces = measure(shape, config, on_cell)
            rows.append(
                dataclasses.asdict(shape) | surfaces | {"m_sat": thresholds(shape, surfaces)}
            )
    path = report.write_result(folder, "dispatch_fit", config, rows)
    picture = _draw(rows, folder / "dispatch_fit.png")
    for row in rows:
        console.print(_table(row))
    console.print(f"Written: {path}, {picture}")
    if write:
        entries = [{k: v for k, v in row.items() if k != "m_sat"} for row in rows]
        console.print(f"Written: {write_costs(device_name(), entries)}")
    return rows


def _table(row: Mapping[str, Any]):
    title = (
        f"K {row['n_kv_heads']}, G {row['group']}, D {row['head_dim']}: us a layer, dense / cascade"
    )
    dense, cascade = row["dense"], row["cascade"]
    return report.table(
        title,
        ["rows", *(f"P {n}" for n in dense["tokens"])],
        [
            [str(n), *(f"{a:.1f} / {b:.1f}" for a, b in zip(one, other, strict=True))]
            for n, one, other in zip(
                dense["rows"], dense["microseconds"], cascade["microseconds"], strict=True
            )
        ]
        + [["M_sat", *(str(m) for m in row["m_sat"].values())]],
    )


def _draw(rows: Sequence[Mapping[str, Any]], path):
    figure, axes = plt.subplots(
        1, len(rows), figsize=(5 * len(rows), 4), squeeze=False, layout="constrained"
    )
    shades = plt.get_cmap("viridis")
    for axis, row in zip(axes[0], rows, strict=True):
        effective = [n * row["group"] for n in row["dense"]["rows"]]
        prefixes = row["dense"]["tokens"]
        for column, prefix in enumerate(prefixes):
            color = shades(column / max(1, len(prefixes) - 1) * 0.85)
            for name, style, marker in (("dense", "-", "s"), ("cascade", "--", "^")):
                us = [line[column] for line in row[name]["microseconds"]]
                axis.plot(
                    effective,
                    us,
                    style,
                    color=color,
                    marker=marker,
                    markersize=4,
                    label=f"{name}, P {prefix}",
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("effective rows, B · G")
        axis.set_ylabel("prefix pass of one layer, µs")
        axis.set_title(f"K {row['n_kv_heads']}, G {row['group']}, D {row['head_dim']}")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6, ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    shared_flags.run_config(lambda config: dispatch_fit(config, write=WRITE.value))
