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
import itertools
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

import models
from experiments import decode_grid_picture, report
from experiments import flags as shared_flags
from experiments.kernel_timing import Ceilings, measure_ceilings
from experiments.running import warm_up
from experiments.serve import make_console
from kvgrain_jax import Engine, EngineConfig, Request, sharding, system_config
from kvgrain_jax.engine import Model
from kvgrain_jax.errors import ConfigError

SIZES = ("tp", "suffix_tokens", "steps", "turns")
FIELDS = (
    *("model", "dtype", "cells", "backends", *SIZES, "end_to_end_tokens", "profile_steps"),
    *("engine", "ceilings", "peers", "out"),
)
SLAB_ALIGN = 128
WARM_STEPS = 16
FAR_BEHIND = 1.5


@dataclasses.dataclass(frozen=True)
class Cell:
    """Rows that share prefixes.

    Attributes:
      prefixes: tokens of each prefix; rows take them in turn. Empty for none.
      batch: rows, ``B``.
    """

    prefixes: tuple[int, ...]
    batch: int

    def __str__(self) -> str:
        lengths = "+".join(str(n) for n in self.prefixes) or "0"
        return f"P {lengths}, B {self.batch}"


def parse_cell(value: Sequence[Any]) -> Cell:
    """A cell of a config.

    Raises:
      ConfigError: it is not a pair of prefix lengths and a batch.
    """
    try:
        prefixes, batch = value
        cell = Cell(tuple(int(n) for n in prefixes if n), int(batch))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{value} is no cell; give ((16384,), 256) or the like.") from error
    if cell.batch < 1 or min(cell.prefixes, default=1) < 1:
        raise ConfigError(f"{value} is no cell; lengths and batch must be positive.")
    return cell


def named(backend: str) -> str | None:
    """The backend that ``Engine.decode`` takes; None dispatches."""
    return None if backend == "auto" else backend


def make_engine(config: Mapping[str, Any], cells: Sequence[Cell], *, new_tokens: int) -> Engine:
    """An engine with room for each of the cells, one at a time.

    Args:
      config: ``model``, ``dtype``, ``tp``, ``suffix_tokens`` and ``engine``.
      cells: the cells.
      new_tokens: tokens that each row may generate.
    """
    mesh = sharding.make_mesh(config["tp"]) if config["tp"] > 1 else None
    model = models.load(config["model"], dtype=config["dtype"], mesh=mesh).model
    return Engine(model, engine_config(model, config, cells, new_tokens=new_tokens))


def engine_config(
    model: Model, config: Mapping[str, Any], cells: Sequence[Cell], *, new_tokens: int
) -> EngineConfig:
    """Pools and batch for the cells; what ``config["engine"]`` says wins."""
    own = config["suffix_tokens"] + new_tokens
    hot = max(sum(-(-n // SLAB_ALIGN) * SLAB_ALIGN for n in set(cell.prefixes)) for cell in cells)
    batch = max(cell.batch for cell in cells)
    # Besides the batch, one slab that a prefix leaves while it moves.
    total = -(-(hot + batch * own + 4096) // SLAB_ALIGN) * SLAB_ALIGN
    context = max(max(cell.prefixes, default=0) for cell in cells) + own
    fields = {
        "max_batch": batch,
        "batch_buckets": tuple(sorted({cell.batch for cell in cells})),
        "max_context": min(model.max_context, -(-context // SLAB_ALIGN) * SLAB_ALIGN),
        "pool_tokens": total,
        "hot_fraction": hot / total,
        "decode_steps": config.get("steps", 16),
        "slab_align": SLAB_ALIGN,
        "kv_dtype": jnp.dtype(config["dtype"]),
        **config["engine"],
    }
    return system_config(
        "kvgrain",
        **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()},
    )


_names = itertools.count()


def fill(engine: Engine, cell: Cell, *, suffix_tokens: int, new_tokens: int) -> None:
    """Serve a cell's requests until all of them decode. Its prefixes are computed before."""
    vocabulary = engine.model.vocabulary
    prefixes = [_text(length, vocabulary, length) for length in cell.prefixes] or [
        np.zeros(0, np.int32)
    ]
    _cache_prefixes(engine, prefixes)
    for i in range(cell.batch):
        suffix = _text(10**6 + next(_names), vocabulary, suffix_tokens)
        _submit(engine, prefixes[i % len(prefixes)], suffix, new_tokens)
    while engine.scheduler.n_decoding < cell.batch:
        engine.prefill()


def _cache_prefixes(engine: Engine, prefixes: Sequence[np.ndarray]) -> None:
    """One request computes each prefix, as a cache that has seen it would hold it."""
    for prefix in prefixes:
        if prefix.size:
            _submit(engine, prefix, _text(next(_names), engine.model.vocabulary, 1), 1)
    while engine.has_work:
        engine.prefill()


def empty(engine: Engine) -> None:
    """End everything that runs, and forget what is cached."""
    for row in engine.scheduler.running:
        engine.abort(row.request.id)
    engine.cache.drop_all()


def _submit(engine: Engine, prefix: np.ndarray, suffix: np.ndarray, new_tokens: int) -> None:
    engine.submit(
        Request(
            f"row {next(_names)}",
            np.concatenate([prefix, suffix]),
            new_tokens,
            shared_tokens=prefix.size,
        )
    )


def _text(seed: int, vocabulary: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, n).astype(np.int32)


def decode_grid(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    warmup_only: bool = False,
) -> list[dict[str, Any]]:
    """Runs a config, or with ``warmup_only`` compiles its programs and measures nothing.

    Returns:
      One row for each cell and backend: ``step_ms`` (mean), ``step_ms_min``, ``step_ms_max``,
      ``ran`` (the backends that the steps took), ``reason`` of the last of them, ``best`` whether no
      single backend was faster, ``roofline_ms`` and its parts, ``peer_ms``.

    Raises:
      ConfigError: the config is wrong; found out before anything is loaded.
    """
    console = console or make_console()
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    for name in SIZES:
        if config[name] < 1:
            raise ConfigError(f"config.{name} is {config[name]}; give at least 1.")
    cells = [parse_cell(cell) for cell in config["cells"]]
    folder = report.check_out_folder(config["out"])
    turns, steps, backends = config["turns"], config["steps"], config["backends"]
    new_tokens = steps * turns * len(backends) + WARM_STEPS * len(backends) + 64
    new_tokens += 2 * config["profile_steps"]
    begin = time.perf_counter()
    with console.status(f"loading {config['model']}"):
        engine = make_engine(config, cells, new_tokens=new_tokens)
        jax.block_until_ready(engine.model.params)
    loaded_s = time.perf_counter() - begin
    if warmup_only:
        warm_up(engine, console)
        return []
    ceilings = None
    if config["ceilings"]:
        with console.status("measuring the device"):
            ceilings = measure_ceilings()
    rows: list[dict[str, Any]] = []
    with rich.progress.Progress(console=console) as progress:
        task = progress.add_task("cells", total=len(cells))
        for cell in cells:
            progress.update(task, description=str(cell))
            begin = time.perf_counter()
            fill(engine, cell, suffix_tokens=config["suffix_tokens"], new_tokens=new_tokens)
            filled_s = time.perf_counter() - begin
            first_token_s = _since_start()
            found = time_cell(engine, backends, steps=steps, turns=turns)
            extra: dict[str, Any] = {"first_token_s": first_token_s}
            if config["profile_steps"]:
                extra |= _profile(engine, config["profile_steps"], backends[0])
            empty(engine)
            if config["end_to_end_tokens"]:
                extra |= end_to_end(
                    engine, cell, config["suffix_tokens"], config["end_to_end_tokens"]
                )
            fastest = min(
                times["step_ms"]
                for name, times in found.items()
                if name != "auto" or len(found) == 1
            )
            for backend, times in found.items():
                row = {
                    "cell": str(cell),
                    "prefixes": list(cell.prefixes),
                    "batch": cell.batch,
                    "backend": backend,
                    **times,
                    "ratio_to_best": fastest / times["step_ms"],
                    "peer_ms": dict(config["peers"]).get(str(cell)),
                    "filled_s": filled_s,
                    **extra,
                }
                if ceilings:
                    row |= roofline(
                        engine.model,
                        cell,
                        ceilings,
                        own_tokens=config["suffix_tokens"] + new_tokens / 2,
                        tp=config["tp"],
                    )
                rows.append(row)
            report.write_result(folder, "decode_grid", config, rows)
            progress.advance(task)
    for row in rows:
        row |= {"loaded_s": loaded_s}
        if ceilings:
            row |= {"ceilings": dataclasses.asdict(ceilings)}
    path = report.write_result(folder, "decode_grid", config, rows)
    console.print(_table(config, rows))
    if (first_token_s := rows[0]["first_token_s"]) is not None:
        console.print(
            f"All rows of {cells[0]} had their first token {first_token_s:.1f} s after the start of "
            f"the process; loading the model took {loaded_s:.1f} s of it."
        )
    picture = decode_grid_picture.draw(rows, folder / "decode_grid.png", config["model"])
    console.print(f"Written: {path}, {picture}")
    return rows


def end_to_end(engine: Engine, cell: Cell, suffix_tokens: int, tokens: int) -> dict[str, float]:
    """A burst of a cell's requests, its prefixes cached: prefill of the suffixes and decoding."""
    vocabulary = engine.model.vocabulary
    _cache_prefixes(engine, [_text(n, vocabulary, n) for n in cell.prefixes])
    requests = []
    for i in range(cell.batch):
        length = cell.prefixes[i % len(cell.prefixes)] if cell.prefixes else 0
        suffix = _text(10**6 + next(_names), vocabulary, suffix_tokens)
        prompt = np.concatenate([_text(length, vocabulary, length), suffix])
        requests.append(Request(f"burst {next(_names)}", prompt, tokens, shared_tokens=length))
    summary = engine.run(requests).summary()
    return {
        "end_to_end_tok_s": summary["output_tokens_per_s"],
        "end_to_end_s": summary["duration_s"],
        "ttft_p50_s": summary["ttft_p50_s"],
        "tpot_p50_s": summary["tpot_p50_s"],
    }


def _profile(engine: Engine, n_steps: int, backend: str) -> dict[str, Any]:
    from experiments import profile  # which builds on this module

    found = profile.profile_loop(engine, n_steps, named(backend))
    return {"profile": profile.per_step(found, n_steps), "waits": found.waits}


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
