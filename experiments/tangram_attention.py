"""Decode attention over KV heads of different lengths: how it is balanced, what planning it costs.

    python -m experiments.tangram_attention --config=configs/tangram/attention_balance.py

In each cell all layers' decode attention of one step is timed, layer after layer in one jitted loop, over
caches that hold the same number of tokens:

  uniform   all heads of one length, pages of whole layers; every head in as many parts.
  static    heads of their own lengths; every head in as many parts (FlashDecoding's heuristic).
  planned   heads of their own lengths; parts planned on the host for each layer in each step
            (FlashInfer's way). Planning and the upload of the plan are timed apart, and add up.
  aot       heads of their own lengths; parts by the split table made ahead of time.
  split_kv  as ``uniform``, by ``split_kv_decode`` with its own parts.

``aot:mosaic`` names the implementation, ``auto`` where there is none. The first four run the same kernel. Times
are compared with the fastest uniform cache. With ``rest`` the model's step without its attention is timed
as well, and the share of planning in the whole step is told (Table 1).

Fields of a config:
  models                  names, see ``models.NAMED_CONFIGS``.
  profile                 npz of a head profile, ours or a published one; see ``read_demands``.
  cells                   (context, batch, retention) of each cell.
  methods                 of those above.
  page_size, group_size, scope   of the head groups; scope is ``global`` or ``layer``.
  blocks_per_processor    parts that all rows make together, for each multiprocessor.
  knobs                   block, num_warps and num_stages of the kernel; tuned where 0.
  dtype, runs, repeats    steps in one timed call, an odd number; timed calls.
  rest                    whether to time the rest of the models' step.
  ceiling                 sizes of the matmul and of the copy that give the device's rates.
  bar                     the most that ``aot`` may take, in times of ``uniform``.
  out                     folder for ``result.json`` and the picture.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import rich.console

from experiments import flags as shared_flags
from experiments import report, tangram_attention_picture
from experiments.kernel_timing import Ceilings, TimedLoop, compile_all, measure_ceilings
from experiments.serve import make_console
from experiments.tangram_attention_bench import (
    Bench,
    Method,
    make_bench,
    parse_method,
    shape_of_work,
)
from experiments.tangram_attention_caches import Cell, read_demands
from experiments.tangram_attention_programs import compile_attention, rest_of_step
from kvgrain_jax.errors import ConfigError

FIELDS = (
    *("models", "profile", "cells", "methods", "page_size", "group_size", "scope"),
    *("blocks_per_processor", "knobs", "dtype", "runs", "repeats", "rest", "ceiling", "bar", "out"),
)
PLANS = 9  # host plans of a cell that are timed


def time_cell(
    bench: Bench,
    cell: Cell,
    programs: Mapping[tuple[Any, ...], TimedLoop | Exception],
    config: Mapping[str, Any],
    ceilings: Ceilings,
) -> list[dict[str, Any]]:
    """Times the methods in one cell; a row for each."""
    rows: list[dict[str, Any]] = []
    outputs: dict[str, jax.Array] = {}
    model = bench.demands.model
    tokens = cell.batch * model.layers * model.kv_heads * bench.demands.uniform_tokens(cell)
    flops = 4 * tokens * model.heads // model.kv_heads * model.head_dim
    n_bytes = 2 * tokens * model.head_dim * bench.k.dtype.itemsize
    for name in config["methods"]:
        method = parse_method(name)
        row = {"model": bench.demands.name, "demands": bench.demands.source}
        row |= {**dataclasses.asdict(cell), "method": name}
        rows.append(row)
        program = programs[*method.program, cell.batch]
        if isinstance(program, Exception):
            row["error"] = f"{type(program).__name__}: {program}"[:400]
            continue
        splits = bench.splits(cell, method)
        args = bench.args(cell, method, splits)
        out = program.call(*args)
        like = outputs.setdefault(method.layout, out)
        ms = dataclasses.replace(program, args=args).microseconds(config["repeats"]) / 1e3
        plan = _time_plan(bench, cell, method) if method.kind == "planned" else {}
        row |= {
            "attention_ms": ms,
            **plan,
            "total_ms": ms + sum(plan.values()),
            "gb": n_bytes / 1e9,
            "tb_s": n_bytes / ms / 1e9,
            "of_roofline": ceilings.floor(flops, n_bytes) / 1e3 / ms,
            "difference": float(jnp.max(jnp.abs(out - like))),
        }
        if splits is not None:
            row |= shape_of_work(bench.budgets(cell, method), splits, config["page_size"])
    uniform = [
        row["total_ms"]
        for row in rows
        if "total_ms" in row and parse_method(row["method"]).layout == "uniform"
    ]
    for row in rows:
        if uniform and "total_ms" in row:
            row["over_uniform"] = row["total_ms"] / min(uniform)
    return rows


def attention(
    config: Mapping[str, Any], console: rich.console.Console | None = None
) -> list[dict[str, Any]]:
    """Runs a config. Results are written after each cell.

    Returns:
      One row for each model, cell and method: ``attention_ms``, ``plan_ms`` and ``upload_ms`` where
      there is a plan, ``total_ms``, ``over_uniform``, ``tb_s``, ``of_roofline``, ``imbalance`` and
      ``parts`` (tokens of each program) of the layer that is cut worst, ``difference`` to the
      outputs of the first method on the same cache; with ``rest`` also ``rest_ms`` and
      ``plan_share`` of the whole step.

    Raises:
      ConfigError: the config is wrong; found out before anything is computed.
    """
    console = console or make_console()
    cells = check_config(config)
    folder = report.check_out_folder(config["out"])
    for name in config["models"]:
        read_demands(name, config["profile"])
    ceilings = measure_ceilings(*config["ceiling"])
    console.print(
        f"matmul {ceilings.matmul / 1e12:.3g} TFLOP/s, copy {ceilings.copy / 1e12:.3g} TB/s, read "
        f"{ceilings.read / 1e12:.3g} TB/s"
    )
    rows: list[dict[str, Any]] = []
    for name in config["models"]:
        begin = time.perf_counter()
        with console.status(f"{name}: caches and programs"):
            bench = make_bench(name, config, cells)
            programs = _programs(bench, config, cells)
            rest = {cell: rest_of_step(name, config, cell) for cell in cells if config["rest"]}
        console.print(
            f"{name}: {bench.demands.source}; {2 * bench.k.nbytes / 1e9:.1f} GB, compiled in "
            f"{time.perf_counter() - begin:.0f} s"
        )
        for cell in cells:
            found = time_cell(bench, cell, programs, config, ceilings)
            rows += [_with_rest(row, rest.get(cell)) for row in found]
            report.write_result(folder, "tangram_attention", config, rows, ceilings=ceilings)
            console.print(_table(f"{name}: {cell}, ms a step", rows[-len(found) :], config["bar"]))
            for row in found:
                if "error" in row and cell == cells[0]:
                    console.print(f"{row['method']}: {row['error']}")
        del bench, programs
    picture = tangram_attention_picture.draw(rows, folder / "attention.png", config["bar"])
    console.print(f"Written: {folder / 'result.json'}, {picture}")
    return rows


def check_config(config: Mapping[str, Any]) -> list[Cell]:
    """The cells of a config.

    Raises:
      ConfigError: a field is missing, unknown or out of range.
    """
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    for name in config["methods"]:
        parse_method(name)
    for name in ("page_size", "group_size", "blocks_per_processor", "repeats", "runs"):
        if config[name] < 1:
            raise ConfigError(f"config.{name} is {config[name]}; give at least 1.")
    if config["runs"] % 2 == 0:
        raise ConfigError(f"config.runs is {config['runs']}; give an odd number.")
    try:
        cells = [Cell(int(n), int(rows), float(kept)) for n, rows, kept in config["cells"]]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "A cell is (context, batch, retention), like (100000, 4, 0.25)."
        ) from error
    for cell in cells:
        if cell.context < 1 or cell.batch < 1 or not 0 < cell.retention <= 1:
            raise ConfigError(f"{tuple(dataclasses.astuple(cell))} is no cell; check its sizes.")
    return cells


def _programs(
    bench: Bench, config: Mapping[str, Any], cells: Sequence[Cell]
) -> dict[tuple[Any, ...], TimedLoop | Exception]:
    """One for each kernel, layout and batch."""
    first = {cell.batch: cell for cell in reversed(cells)}
    jobs = {
        (*method.program, batch): partial(_compile, bench, config, method, cell)
        for method in map(parse_method, config["methods"])
        for batch, cell in first.items()
    }
    return dict(zip(jobs, compile_all(list(jobs.values())), strict=True))


def _compile(bench: Bench, config: Mapping[str, Any], method: Method, cell: Cell) -> TimedLoop:
    return compile_attention(
        bench.demands.model,
        bench.layouts[method.layout],
        bench.args(cell, method, bench.splits(cell, method)),
        method,
        knobs={name: value for name, value in config["knobs"].items() if value},
        runs=config["runs"],
    )


def _time_plan(bench: Bench, cell: Cell, method: Method) -> dict[str, float]:
    """Milliseconds of one step's planning, all layers, and of bringing the plans to the device."""
    planned, uploaded = [], []
    for _ in range(PLANS):
        begin = time.perf_counter()
        lists = bench.work_lists(cell, method, bench.splits(cell, method))
        middle = time.perf_counter()
        jax.block_until_ready(jax.device_put(lists))
        planned.append(middle - begin)
        uploaded.append(time.perf_counter() - middle)
    return {
        "plan_ms": statistics.median(planned) * 1e3,
        "upload_ms": statistics.median(uploaded) * 1e3,
    }


def _with_rest(row: dict[str, Any], rest_ms: float | None) -> dict[str, Any]:
    if rest_ms is None or "total_ms" not in row:
        return row
    step = row["total_ms"] + rest_ms
    return row | {"rest_ms": rest_ms, "plan_share": row.get("plan_ms", 0.0) / step}


def _table(title: str, rows: Sequence[Mapping[str, Any]], bar: float):
    fields = {
        "attention": ("attention_ms", ".3f"),
        "plan": ("plan_ms", ".3f"),
        "upload": ("upload_ms", ".3f"),
        "total ms": ("total_ms", ".3f"),
        "TB/s": ("tb_s", ".2f"),
        "of roof": ("of_roofline", ".2f"),
        "part/mean": ("imbalance", ".2f"),
        "x uniform": ("over_uniform", ".3f"),
        "rest": ("rest_ms", ".3f"),
        "planning": ("plan_share", ".1%"),
    }
    if any("rest_ms" in row for row in rows):
        dropped = ("TB/s", "of roof", "part/mean")
    else:
        dropped = ("rest", "planning")
    shown = {name: field for name, field in fields.items() if name not in dropped}

    def cells(row: Mapping[str, Any]) -> list[str]:
        if "error" in row:
            return [row["method"], "not run", *[""] * len(shown)]
        met = row["method"].startswith("aot") and "over_uniform" in row
        values = [f"{row[key]:{form}}" if key in row else "" for key, form in shown.values()]
        goal = ("yes" if row["over_uniform"] <= bar else "no") if met else ""
        return [row["method"], *values, goal]

    return report.table(title, ["method", *shown, f"<= {bar:g}"], [cells(row) for row in rows])


if __name__ == "__main__":
    shared_flags.run_config(attention)
