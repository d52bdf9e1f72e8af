"""Times one decode step over a grid of shared prefixes and batch sizes, backend by backend.

    python -m experiments.decode_grid --config=configs/decode_grid.py
    python -m experiments.decode_grid --config=configs/decode_grid.py --warmup   # only compile

In each cell a batch of rows is served until all of them decode: its prefixes are cached, each row has a
suffix of its own. Then the backends take turns over the same running batch, each turn one call of the
decode loop, and a backend's figure is the mean of its turns: the rows grow meanwhile. Beside it stands the roofline of the
step: weights, matmuls, prefix and suffix at the rates that the same run reached.

Fields of a config:
  model, dtype            as in ``experiments.serve``.
  tp                      devices that run the model together.
  cells                   pairs of prefix lengths and batch: ``((16384,), 256)``; rows take the
                          prefixes in turn.
  backends                ``auto`` and names of backends.
  suffix_tokens           tokens of each row behind the prefix when the clock starts.
  steps                   decode steps of one turn.
  turns                   turns of each backend; one for those that take over ``FAR_BEHIND`` times the
                          fastest one's time in the first turn.
  end_to_end_tokens       output tokens of a burst of each cell's requests, served from the cached
                          prefix and timed as a whole; 0 for none.
  profile_steps           decode steps to record with the profiler in each cell; 0 for none.
  engine                  fields of ``EngineConfig``; pools and batch follow from the cells.
  ceilings                whether to measure the device's rates and print rooflines.
  peers                   milliseconds of another system, by cell as it is printed.
  out                     folder for ``result.json`` and the picture.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from experiments import decode_cells, decode_grid_picture, profile, report
from experiments import flags as shared_flags
from experiments.decode_cells import Cell, named
from experiments.kernel_timing import Ceilings, measure_ceilings
from experiments.running import warm_up
from experiments.serve import make_console
from kvgrain_jax import Engine
from kvgrain_jax.engine import Model
from kvgrain_jax.errors import ConfigError

SIZES = ("tp", "suffix_tokens", "steps", "turns")
FIELDS = (
    *("model", "dtype", "cells", "backends", *SIZES, "end_to_end_tokens", "profile_steps"),
    *("engine", "ceilings", "peers", "out"),
)
WARM_STEPS = 16
FAR_BEHIND = 1.5


def decode_grid(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    warmup_only: bool = False,
) -> list[dict[str, Any]]:
    """Runs a config, or with ``warmup_only`` compiles its programs and measures nothing.

    Returns:
      One row for each cell and backend: ``step_ms`` (mean), ``step_ms_min``, ``step_ms_max``,
      ``ran`` (the backends that the steps took), ``reason`` of the last of them, ``ratio_to_best``
      (time with the fastest single backend over this one), ``roofline_ms`` and its parts, ``peer_ms``.

    Raises:
      ConfigError: the config is wrong; found out before anything is loaded.
    """
    console = console or make_console()
    cells = _check(config)
    folder = report.check_out_folder(config["out"])
    begin = time.perf_counter()
    with console.status(f"loading {config['model']}"):
        engine = decode_cells.make_engine(config, cells, new_tokens=_new_tokens(config))
        jax.block_until_ready(engine.model.params)
    run: dict[str, Any] = {"loaded_s": time.perf_counter() - begin}
    if warmup_only:
        warm_up(engine, console)
        return []
    ceilings = None
    if config["ceilings"]:
        with console.status("measuring the device"):
            ceilings = measure_ceilings()
        run["ceilings"] = dataclasses.asdict(ceilings)
    rows: list[dict[str, Any]] = []
    with rich.progress.Progress(console=console) as progress:
        task = progress.add_task("cells", total=len(cells))
        for cell in cells:
            progress.update(task, description=str(cell))
            rows += [row | run for row in measure(engine, cell, config, ceilings)]
            report.write_result(folder, "decode_grid", config, rows)
            progress.advance(task)
    _render(config, rows, folder, console)
    return rows


def _check(config: Mapping[str, Any]) -> list[Cell]:
    """The cells of a config, all of whose fields are there and in range."""
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    for name in SIZES:
        if config[name] < 1:
            raise ConfigError(f"config.{name} is {config[name]}; give at least 1.")
    return [decode_cells.parse_cell(cell) for cell in config["cells"]]


def _new_tokens(config: Mapping[str, Any]) -> int:
    """Enough of each row for all turns of all backends."""
    steps = config["steps"] * config["turns"] + WARM_STEPS
    return steps * len(config["backends"]) + 64 + 2 * config["profile_steps"]


def measure(
    engine: Engine, cell: Cell, config: Mapping[str, Any], ceilings: Ceilings | None
) -> list[dict[str, Any]]:
    """Fills the engine with a cell, measures it and empties it again.

    Returns:
      The cell's rows, see ``decode_grid``.
    """
    suffix_tokens, new_tokens = config["suffix_tokens"], _new_tokens(config)
    begin = time.perf_counter()
    decode_cells.fill(engine, cell, suffix_tokens=suffix_tokens, new_tokens=new_tokens)
    of_cell: dict[str, Any] = {
        "peer_ms": dict(config["peers"]).get(str(cell)),
        "filled_s": time.perf_counter() - begin,
        "first_token_s": _since_start(),
    }
    found = time_cell(engine, config["backends"], steps=config["steps"], turns=config["turns"])
    if n_steps := config["profile_steps"]:
        shares = profile.profile_loop(engine, n_steps, named(config["backends"][0]))
        of_cell |= {"profile": profile.per_step(shares, n_steps), "waits": shares.waits}
    decode_cells.empty(engine)
    if tokens := config["end_to_end_tokens"]:
        of_cell |= decode_cells.end_to_end(engine, cell, suffix_tokens, tokens)
    if ceilings:
        own_tokens = suffix_tokens + new_tokens / 2
        of_cell |= roofline(engine.model, cell, ceilings, own_tokens=own_tokens, tp=config["tp"])
    single = [
        times["step_ms"] for name, times in found.items() if name != "auto" or len(found) == 1
    ]
    return [
        {
            "cell": str(cell),
            "prefixes": list(cell.prefixes),
            "batch": cell.batch,
            "backend": backend,
            **times,
            "ratio_to_best": min(single) / times["step_ms"],
            **of_cell,
        }
        for backend, times in found.items()
    ]


def _since_start() -> float | None:
    """Seconds since this process was started, where the system tells."""
    try:
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        up = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return up - ticks / os.sysconf("SC_CLK_TCK")


def time_cell(
    engine: Engine, backends: Sequence[str], *, steps: int, turns: int
) -> dict[str, dict[str, Any]]:
    """Times the running batch with each of the backends, turn about."""
    times: dict[str, list[float]] = {name: [] for name in backends}
    ran: dict[str, set[str]] = {name: set() for name in backends}
    reasons = dict.fromkeys(backends, "")
    compiled_s = {}
    for name in backends:
        begin = time.perf_counter()
        engine.decode(WARM_STEPS, named(name))
        compiled_s[name] = time.perf_counter() - begin
    near = list(backends)
    for turn in range(turns):
        # There and back, as the rows grow from turn to turn; what is far behind is timed once.
        for name in near if turn % 2 == 0 else reversed(near):
            done = len(engine.metrics.steps)
            begin = time.perf_counter()
            engine.decode(steps, named(name))
            seconds = time.perf_counter() - begin
            taken = engine.metrics.steps[done:]
            if len(taken) != steps:
                raise ConfigError(f"A turn ran {len(taken)} steps instead of {steps}.")
            times[name].append(seconds / steps * 1e3)
            ran[name] |= {step.backend for step in taken}
            reasons[name] = taken[-1].reason
        fastest = min(values[0] for values in times.values())
        near = [name for name in backends if times[name][0] < FAR_BEHIND * fastest]
    return {
        name: {
            "step_ms": float(np.mean(values)),
            "step_ms_min": min(values),
            "step_ms_max": max(values),
            "ran": sorted(ran[name]),
            "reason": reasons[name],
            "turns": len(values),
            "first_call_s": compiled_s[name],
        }
        for name, values in times.items()
    }


def roofline(
    model: Model, cell: Cell, ceilings: Ceilings, *, own_tokens: float, tp: int = 1
) -> dict[str, float]:
    """Least milliseconds of a step at the device's rates, and of its parts.

    The weights are read once and multiplied with every row; each prefix is read once and attended by
    its rows; each row reads its own tokens. The embedding is looked up, not multiplied.
    """
    sizes = {leaf.shape: leaf.size for leaf in jax.tree.leaves(model.params)}
    item = jax.tree.leaves(model.params)[0].dtype.itemsize
    lookup = max(sizes.values()) if len(sizes) > 1 else 0
    weights = sum(leaf.size for leaf in jax.tree.leaves(model.params)) - lookup
    token_bytes = 2 * model.n_kv_heads * model.head_dim * item * model.n_layers
    flops_a_key = 4 * model.n_heads * model.head_dim * model.n_layers
    rows = cell.batch / max(1, len(cell.prefixes))

    def milliseconds(flops: float, n_bytes: float) -> float:
        return ceilings.floor(flops / tp, n_bytes / tp) * 1e-3

    prefix = sum(milliseconds(flops_a_key * rows * n, token_bytes * n) for n in cell.prefixes)
    own = cell.batch * own_tokens
    parts: dict[str, float] = {
        "matmul_roofline_ms": milliseconds(2 * weights * cell.batch, weights * item),
        "prefix_roofline_ms": prefix,
        "own_roofline_ms": milliseconds(flops_a_key * own, token_bytes * own),
    }
    return parts | {"roofline_ms": float(sum(parts.values()))}


def _render(
    config: Mapping[str, Any],
    rows: list[dict[str, Any]],
    folder: pathlib.Path,
    console: rich.console.Console,
) -> None:
    console.print(_table(config, rows))
    first = rows[0]
    if first["first_token_s"] is not None:
        console.print(
            f"All rows of {first['cell']} had their first token {first['first_token_s']:.1f} s after "
            f"the start of the process; loading the model took {first['loaded_s']:.1f} s of it."
        )
    picture = decode_grid_picture.draw(rows, folder / "decode_grid.png", config["model"])
    console.print(f"Written: {folder / 'result.json'}, {picture}")


def _table(config: Mapping[str, Any], rows: list[dict[str, Any]]):
    def line(row):
        peer = row["peer_ms"]
        bound = row.get("roofline_ms")
        return [
            row["cell"],
            row["backend"],
            f"{row['step_ms']:.2f}",
            f"{row['step_ms_min']:.2f}-{row['step_ms_max']:.2f}",
            ", ".join(row["ran"]),
            f"{row['ratio_to_best']:.2f}",
            "" if bound is None else f"{bound:.2f} ({bound / row['step_ms']:.2f})",
            "" if peer is None else f"{peer:.2f} ({peer / row['step_ms']:.1f}x)",
        ]

    return report.table(
        f"One decode step of {config['model']}, {config['tp']} devices",
        ["cell", "backend", "ms", "range", "ran", "best / it", "roofline (share)", "peer"],
        [line(row) for row in rows],
    )


if __name__ == "__main__":
    WARMUP = shared_flags.define_warmup()
    shared_flags.run_config(lambda config: decode_grid(config, warmup_only=WARMUP.value))
