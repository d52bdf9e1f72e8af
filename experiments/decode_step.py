"""Times one decode step of several systems side by side: B rows that share a prefix of P tokens.

    python -m experiments.decode_step --config=configs/decode_step.py

All systems hold their batch at once and take turns, there and back, so that a slow moment of the
machine meets all of them; the figure of a system is the median of its turns. Prefill and compilation
are not timed.

Fields of a config:
  model, dtype            as in ``experiments.serve``.
  systems                 names; ratios are to the first one.
  engine                  fields of ``EngineConfig`` for all systems; pools and batch are set here.
  prefix_tokens           P.
  batch                   B.
  suffix_tokens           tokens of each row after the prefix when the clock starts, at least.
  steps                   decode steps of one turn.
  repeats                 turns of each system.
  out                     folder for ``result.json``.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import rich.console

import models
from experiments import flags as shared_flags
from experiments import report
from experiments.running import engine_configs
from experiments.serve import make_console
from experiments.workloads import Target, prepare
from kvgrain_jax.engine import Engine, EngineConfig, Model
from kvgrain_jax.errors import ConfigError

SIZES = ("prefix_tokens", "batch", "suffix_tokens", "steps", "repeats")
FIELDS = ("model", "dtype", "systems", "engine", *SIZES, "out")
WARMUP_TURNS = 2


def decode_step(
    config: Mapping[str, Any], console: rich.console.Console | None = None
) -> list[dict[str, Any]]:
    """Runs a config.

    Returns:
      One row for each system: ``system``, ``step_ms`` (median), ``step_ms_p10``, ``step_ms_p90``,
      ``ratio`` of its median to that of the first system, ``backends``, ``turns``.

    Raises:
      ConfigError: the config is wrong; found out before anything is loaded.
    """
    console = console or make_console()
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    for name in SIZES:
        if config[name] < 1:
            raise ConfigError(f"config.{name} is {config[name]}; give at least 1.")
    systems = engine_configs(config["systems"], {**config["engine"], **_sizes(config)})
    folder = report.check_out_folder(config["out"])

    with console.status(f"loading {config['model']}"):
        model = models.load(config["model"], dtype=config["dtype"]).model
    with console.status("compiling and computing the prompts"):
        engines = {name: ready_engine(model, system, config) for name, system in systems.items()}
    with console.status("timing"):
        times = take_turns(engines, config)
    rows = _rows(engines, times)
    path = report.write_result(folder, "decode_step", config, rows)
    console.print(_table(config, rows))
    console.print(f"Written: {path}")
    return rows


def _output_tokens(config: Mapping[str, Any]) -> int:
    """Enough for all turns; none of the rows may finish before the last one.

    The first rows decode already while the prompts of the others are computed, a few at a time: a
    few steps after each chunk, a whole turn when a prefix is complete for which all others wait,
    and one with the last chunk.
    """
    engine, prefix = config["engine"], config["prefix_tokens"]
    lengths = (prefix,) if isinstance(prefix, int) else prefix
    others = sum(lengths[1:])
    prompts = others + config["batch"] * (config["suffix_tokens"] + 1)
    tokens = engine.get("chunk_tokens", EngineConfig.chunk_tokens)
    requests = engine.get("chunk_requests", EngineConfig.chunk_requests)
    calls = -(-prompts // tokens) + 2 * -(-config["batch"] // requests) + 1
    between = engine.get("prefill_decode_steps", EngineConfig.prefill_decode_steps)
    turns = len(lengths) + 1 + WARMUP_TURNS + config["repeats"]
    return calls * min(between, config["steps"]) + turns * config["steps"] + 1


def _context(config: Mapping[str, Any]) -> int:
    needed = config["prefix_tokens"] + config["suffix_tokens"] + _output_tokens(config)
    return -(-needed // 64) * 64


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``EngineConfig`` that follow from what is timed."""
    own = _context(config) - config["prefix_tokens"]
    # The prefix once in HOT, and room for every row beside it, whatever share HOT gets.
    prefix = -(-config["prefix_tokens"] // 64) * 64
    total = 2 * prefix + config["batch"] * own
    return {
        "max_batch": config["batch"],
        "max_context": _context(config),
        "pool_tokens": total,
        "hot_fraction": prefix / total,
        "decode_steps": config["steps"],
    }


def ready_engine(model: Model, system: EngineConfig, config: Mapping[str, Any]) -> Engine:
    """An engine whose batch is full and past its prompts.

    Args:
      model: the language model.
      system: the engine's configuration, with room for the rows.
      config: ``SIZES`` and the section ``engine`` of a config; ``prefix_tokens`` may be several
        lengths, of as many prefixes.
    """
    make = prepare(
        {
            "kind": "synthetic",
            "requests": config["batch"],
            "prefix_tokens": config["prefix_tokens"],
            "suffix_tokens": config["suffix_tokens"],
            "output_tokens": _output_tokens(config),
        }
    )
    workload = make(Target(model.vocabulary, min(system.max_context or 0, model.max_context)))
    engine = Engine(model, system)
    engine.warmup()
    for request in workload.requests:
        engine.submit(request)
    started: set[str] = set()
    while len(started) < len(workload.requests):
        started |= {event.id for event in engine.step()}
    for _ in range(WARMUP_TURNS):
        engine.step()
    return engine


def take_turns(
    engines: Mapping[str, Engine],
    config: Mapping[str, Any],
    progress: Callable[[int], None] = lambda turn: None,
) -> dict[str, list[float]]:
    """Seconds of a decode step in each turn of each engine; the turns go there and back.

    Args:
      engines: of ``ready_engine``.
      config: as there.
      progress: called before each round of turns, with how many are done.
    """
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(config["repeats"]):
        progress(turn)
        for name in engines if turn % 2 == 0 else reversed(list(engines)):
            times[name].append(time_turn(engines[name], config))
    return times


def time_turn(engine: Engine, config: Mapping[str, Any]) -> float:
    """Seconds of one decode step, averaged over the steps of a turn."""
    done = len(engine.metrics.steps)
    begin = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - begin
    steps = engine.metrics.steps[done:]
    fewest = min((s.rows for s in steps), default=0)
    if len(steps) != config["steps"] or fewest != config["batch"]:
        raise ConfigError(
            f"A turn ran {len(steps)} steps with {fewest} rows or more instead of {config['steps']} "
            f"with {config['batch']}; give the pool room for all rows, or shorten the workload."
        )
    return seconds / len(steps)


def _rows(engines: Mapping[str, Engine], times: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    reference = float(np.median(next(iter(times.values()))))
    rows = []
    for name, seconds in times.items():
        low, median, high = np.percentile(seconds, [10, 50, 90]) * 1000
        summary = engines[name].metrics.summary()
        rows.append(
            {
                "system": name,
                "step_ms": median,
                "step_ms_p10": low,
                "step_ms_p90": high,
                "ratio": median / 1000 / reference,
                "backends": sorted(summary["backend_fractions"]),
                "turns": len(seconds),
            }
        )
    return rows


def _table(config: Mapping[str, Any], rows: list[dict[str, Any]]):
    first = rows[0]["system"]
    return report.table(
        f"One decode step of {config['model']}, P = {config['prefix_tokens']}, "
        f"B = {config['batch']}",
        ["system", "median, ms", "p10 / p90, ms", f"ratio to {first}", "backend"],
        [
            [
                row["system"],
                f"{row['step_ms']:.1f}",
                f"{row['step_ms_p10']:.1f} / {row['step_ms_p90']:.1f}",
                f"{row['ratio']:.2f}",
                ", ".join(row["backends"]),
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    shared_flags.run_config(decode_step)
