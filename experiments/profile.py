"""Where the time of a decode loop goes: shares of attention, matmuls, other kernels, collectives, idle.

    python -m experiments.profile --config=configs/profile.py
    python -m experiments.profile --config=configs/profile.py --warmup   # only compile

Serves a batch until all its rows decode, records one call of the decode loop with ``jax.profiler``, and
adds up the device's events by kind (see ``experiments.device_trace``). With the paper's letters: α is the
share of attention, β that of collectives, γ the rest of the busy time. Below them stand the waits that cost
most, with how often they come: once a step, in each layer, or once a call of the loop.

Fields of a config:
  model, dtype            as in ``experiments.serve``.
  tp                      devices that run the model together.
  cells                   ``(prefix lengths, batch)``, see ``experiments.decode_cells``.
  backends                backends to profile in each cell.
  suffix_tokens           tokens of each row behind the prefix.
  steps                   decode steps that are recorded.
  engine                  fields of ``EngineConfig``.
  out                     folder for ``result.json``.
"""

from collections.abc import Mapping
from typing import Any

import rich.console

from experiments import decode_cells, report
from experiments import flags as shared_flags
from experiments.device_trace import KINDS, Shares, add_up, inside_loop, record
from experiments.running import warm_up
from experiments.serve import make_console
from kvgrain_jax.engine import Engine, EngineConfig, Model
from kvgrain_jax.errors import ConfigError

FIELDS = ("model", "dtype", "tp", "cells", "backends", "suffix_tokens", "steps", "engine", "out")
LONGEST = 12  # kernels and waits that a row keeps
SHOWN = 3  # waits of them in the terminal


def profile_loop(engine: Engine, n_steps: int, backend: str | None = None) -> Shares:
    """Shares of one call of the decode loop over the rows that an engine decodes."""
    engine.decode(n_steps, backend)  # compiled, and warm
    return add_up(inside_loop(record(lambda: engine.decode(n_steps, backend))))


def shares(
    model: Model,
    engine_config: EngineConfig,
    cell: decode_cells.Cell,
    *,
    suffix_tokens: int = 128,
    n_steps: int = 8,
) -> Shares:
    """Shares of ``n_steps`` decode steps of a cell, in an engine of their own.

    Args:
      model: the language model.
      engine_config: the engine, with room for the cell.
      cell: prefixes and rows.
      suffix_tokens: tokens of each row behind its prefix.
      n_steps: steps that are recorded.
    """
    engine = Engine(model, engine_config)
    decode_cells.fill(engine, cell, suffix_tokens=suffix_tokens, new_tokens=2 * n_steps + 64)
    return profile_loop(engine, n_steps)


def per_step(found: Shares, n_steps: int) -> dict[str, float]:
    """Milliseconds of one step: ``attention_ms`` and so on for each of ``KINDS``, ``idle_ms``,
    ``launch_ms``, ``step_ms``; and ``kernels_per_step``."""
    of_kinds = {f"{kind}_ms": found.kinds[kind] / n_steps for kind in KINDS}
    return of_kinds | {
        "idle_ms": found.idle / n_steps,
        "launch_ms": found.launch / n_steps,
        "step_ms": found.total / n_steps,
        "kernels_per_step": found.count / n_steps,
    }


def profile(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    warmup_only: bool = False,
) -> list[dict[str, Any]]:
    """Runs a config, or with ``warmup_only`` compiles its programs and measures nothing.

    Returns:
      One row for each cell and backend: what ``per_step`` returns, the cell, ``kernels`` with the time
      of the longest ones, ``waits`` (the longest gaps), ``waits_between`` (those that cost most in all,
      as ``(before, after, times a step, milliseconds a step)``), and ``alpha``, ``beta``, ``gamma``,
      ``idle`` as fractions of the step.

    Raises:
      ConfigError: the config is wrong; found out before anything is loaded.
    """
    console = console or make_console()
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    folder = report.check_out_folder(config["out"])
    cells = [decode_cells.parse_cell(cell) for cell in config["cells"]]
    new_tokens = 64 + 2 * config["steps"] * len(config["backends"])
    with console.status(f"loading {config['model']}"):
        engine = decode_cells.make_engine(config, cells, new_tokens=new_tokens)
    if warmup_only:
        warm_up(engine, console)
        return []
    rows = []
    for cell in cells:
        decode_cells.fill(
            engine, cell, suffix_tokens=config["suffix_tokens"], new_tokens=new_tokens
        )
        for backend in config["backends"]:
            with console.status(f"{cell}, {backend}"):
                found = profile_loop(engine, config["steps"], decode_cells.named(backend))
            step = per_step(found, config["steps"])
            rows.append(
                {
                    "cell": str(cell),
                    "prefixes": list(cell.prefixes),
                    "batch": cell.batch,
                    "backend": backend,
                    **step,
                    "alpha": step["attention_ms"] / step["step_ms"],
                    "beta": step["collectives_ms"] / step["step_ms"],
                    "gamma": (step["matmul_ms"] + step["other_ms"]) / step["step_ms"],
                    "idle": step["idle_ms"] / step["step_ms"],
                    "waits": found.waits,
                    "waits_between": [
                        (*pair, times / config["steps"], ms / config["steps"])
                        for pair, (times, ms) in list(found.waits_between.items())[:LONGEST]
                    ],
                    "kernels": {
                        name: ms / config["steps"]
                        for name, ms in list(found.names.items())[:LONGEST]
                    },
                }
            )
        decode_cells.empty(engine)
    path = report.write_result(folder, "profile", config, rows)
    console.print(_table(config, rows))
    console.print(_waits(rows))
    console.print(f"Written: {path}")
    return rows


def _table(config: Mapping[str, Any], rows: list[dict[str, Any]]):
    return report.table(
        f"One decode step of {config['model']}, milliseconds by kind",
        ["cell", "backend", "step", *KINDS, "idle", "of it launches", "alpha / beta / gamma"],
        [
            [
                row["cell"],
                row["backend"],
                f"{row['step_ms']:.2f}",
                *(f"{row[f'{kind}_ms']:.2f}" for kind in KINDS),
                f"{row['idle_ms']:.2f} ({row['idle']:.1%})",
                f"{row['launch_ms']:.2f} of {row['kernels_per_step']:.0f} kernels",
                f"{row['alpha']:.2f} / {row['beta']:.2f} / {row['gamma']:.2f}",
            ]
            for row in rows
        ],
    )


def _waits(rows: list[dict[str, Any]]):
    return report.table(
        "Where the device waits longest, between which kernels",
        ["cell", "backend", "before", "after", "times a step", "ms a step"],
        [
            [
                row["cell"],
                row["backend"],
                _short(before),
                _short(after),
                f"{times:.2f}",
                f"{ms:.3f}",
            ]
            for row in rows
            for before, after, times, ms in row["waits_between"][:SHOWN]
        ],
    )


def _short(name: str, width: int = 32) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


if __name__ == "__main__":
    WARMUP = shared_flags.define_warmup()
    shared_flags.run_config(lambda config: profile(config, warmup_only=WARMUP.value))
