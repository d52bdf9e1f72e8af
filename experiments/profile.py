"""Where the time of a decode loop goes: shares of attention, matmuls, other kernels, collectives, idle.

    python -m experiments.profile --config=configs/profile.py
    python -m experiments.profile --config=configs/profile.py --warmup   # only compile

Serves a batch until all its rows decode, records one call of the decode loop with ``jax.profiler``, and
adds up the device's events by kind. With the paper's letters: α is the share of attention, β that of
collectives, γ the rest of the busy time. The events of a GPU are its kernels; those of a CPU are XLA's
operations, among which attention cannot be told from other work.

Fields of a config:
  model, dtype            as in ``experiments.serve``.
  tp                      devices that run the model together.
  cells                   ``(prefix lengths, batch)``, see ``experiments.decode_grid``.
  backends                backends to profile in each cell.
  suffix_tokens           tokens of each row behind the prefix.
  steps                   decode steps that are recorded.
  engine                  fields of ``EngineConfig``.
  out                     folder for ``result.json`` and the picture.
"""

import dataclasses
import pathlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import rich.console

from experiments import decode_grid, report
from experiments import flags as shared_flags
from experiments.running import warm_up
from experiments.serve import make_console
from kvgrain_jax.engine import Engine, EngineConfig, Model
from kvgrain_jax.errors import ConfigError

WAITS = 24
LAUNCH_GAP = 5e3  # nanoseconds
KINDS = ("attention", "matmul", "other", "collectives")

# By parts of the name, first match counts: our kernels are named after their operations, cuBLAS's
# and XLA's matmuls after what they are, XLA's own all-reduce after the `psum` that it computes.
_NAMES = {
    "collectives": (
        "nccl",
        "psum",
        "all-reduce",
        "allreduce",
        "all-gather",
        "all-to-all",
        "collective",
    ),
    "attention": ("attention", "split_kv", "merge_triton", "head_group", "uniform_paged", "body_"),
    "matmul": ("gemm", "cutlass", "nvjet", "cublas", "dot", "matmul", "convolution", "xmma"),
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One stretch of work of one device.

    Attributes:
      device: which.
      name: kernel or operation.
      begin, end: nanoseconds.
    """

    device: int
    name: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Shares:
    """Time of one device by kind, milliseconds, in the mean over the devices.

    Attributes:
      kinds: of each of ``KINDS``.
      idle: between the first event and the last, when nothing ran.
      launch: the part of ``idle`` in gaps of less than ``LAUNCH_GAP``: from one kernel to the next
        in line.
      names: of each kernel, longest first.
      count: events of one device.
      waits: the longest gaps, as ``(before, after, milliseconds)``.
    """

    kinds: dict[str, float]
    idle: float
    launch: float
    names: dict[str, float]
    count: float
    waits: list[tuple[str, str, float]]

    @property
    def total(self) -> float:
        """From the first event to the last."""
        return sum(self.kinds.values()) + self.idle


def kind_of(name: str) -> str:
    """Kind of a kernel or operation by its name."""
    lower = name.lower()
    for kind, parts in _NAMES.items():
        if any(part in lower for part in parts):
            return kind
    return "other"


def add_up(events: Iterable[Event]) -> Shares:
    """Times of the kinds; where events of a device overlap, the later begun counts from the end of the other."""
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    names: defaultdict[str, float] = defaultdict(float)
    idle, launch, count, devices = 0.0, 0.0, 0, set()
    reached: dict[int, float] = {}
    gaps: list[tuple[str, str, float]] = []
    before = ""
    for event in sorted(events, key=lambda event: (event.device, event.begin, event.end)):
        devices.add(event.device)
        begin = max(event.begin, reached.get(event.device, event.begin))
        gap = begin - reached.get(event.device, begin)
        idle += gap
        gaps.append((before, event.name, gap * 1e-6))
        before = event.name
        launch += gap if gap < LAUNCH_GAP else 0.0
        count += 1
        if event.end > begin:
            kinds[kind_of(event.name)] += event.end - begin
            names[event.name] += event.end - begin
            reached[event.device] = event.end
    scale = 1e-6 / max(1, len(devices))
    return Shares(
        {kind: ns * scale for kind, ns in kinds.items()},
        idle * scale,
        launch * scale,
        {name: ns * scale for name, ns in sorted(names.items(), key=lambda item: -item[1])},
        count / max(1, len(devices)),
        sorted(gaps, key=lambda gap: -gap[2])[:WAITS],
    )


def record(call: Callable[[], object]) -> list[Event]:
    """Events of the devices while ``call`` runs; it must wait for its work.

    Raises:
      ConfigError: the profiler saw no device event.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        path = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(path))
        events = [*_gpu_events(data)] or [*_cpu_events(data)]
    if not events:
        raise ConfigError("The profiler recorded no event of a device.")
    return events


def _gpu_events(data) -> Iterable[Event]:
    devices = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    for device, plane in enumerate(devices):
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    begin = event.start_ns
                    yield Event(device, event.name, begin, begin + event.duration_ns)


def _cpu_events(data) -> Iterable[Event]:
    for plane in data.planes:
        if plane.name == "/host:CPU":
            for line in plane.lines:
                if line.name.startswith("tf_XLA"):
                    for event in line.events:
                        if any(stat[0] == "hlo_op" for stat in event.stats):
                            begin = event.start_ns
                            yield Event(0, event.name, begin, begin + event.duration_ns)


def profile_loop(engine: Engine, n_steps: int, backend: str | None = None) -> Shares:
    """Shares of one call of the decode loop over the rows that an engine decodes."""
    engine.decode(n_steps, backend)  # compiled, and warm
    return add_up(inside_loop(record(lambda: engine.decode(n_steps, backend))))


def inside_loop(events: Iterable[Event]) -> list[Event]:
    """The events from the first attention or matmul of each device to its last.

    What lies outside belongs to the call of the loop, not to its steps.
    """
    events = list(events)
    ends: dict[int, tuple[float, float]] = {}
    for event in events:
        if kind_of(event.name) in ("attention", "matmul"):
            first, last = ends.get(event.device, (event.begin, event.end))
            ends[event.device] = min(first, event.begin), max(last, event.end)
    if not ends:
        return events
    return [
        event
        for event in events
        if ends[event.device][0] <= event.begin and event.end <= ends[event.device][1]
    ]


def shares(
    model: Model,
    engine_config: EngineConfig,
    cell: decode_grid.Cell,
    *,
    suffix_tokens: int = 128,
    n_steps: int = 8,
) -> dict[str, float]:
    """Milliseconds of one decode step of a cell by kind.

    Args:
      model: the language model.
      engine_config: the engine, with room for the cell.
      cell: prefixes and rows.
      suffix_tokens: tokens of each row behind its prefix.
      n_steps: steps that are recorded.

    Returns:
      ``attention_ms``, ``matmul_ms``, ``other_ms``, ``collectives_ms``, ``idle_ms``, ``step_ms``.
    """
    engine = Engine(model, engine_config)
    decode_grid.fill(engine, cell, suffix_tokens=suffix_tokens, new_tokens=2 * n_steps + 64)
    return per_step(profile_loop(engine, n_steps), n_steps)


def per_step(found: Shares, n_steps: int) -> dict[str, float]:
    """Milliseconds of one step."""
    of_kinds = {f"{kind}_ms": found.kinds[kind] / n_steps for kind in KINDS}
    return of_kinds | {
        "idle_ms": found.idle / n_steps,
        "launch_ms": found.launch / n_steps,
        "step_ms": found.total / n_steps,
        "kernels_per_step": found.count / n_steps,
    }


FIELDS = ("model", "dtype", "tp", "cells", "backends", "suffix_tokens", "steps", "engine", "out")


def profile(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    warmup_only: bool = False,
) -> list[dict[str, Any]]:
    """Runs a config, or with ``warmup_only`` compiles its programs and measures nothing.

    Returns:
      One row for each cell and backend: what ``shares`` returns, the cell, ``kernels`` with the time
      of the longest ones, and ``alpha``, ``beta``, ``gamma``, ``idle`` as fractions of the step.

    Raises:
      ConfigError: the config is wrong; found out before anything is loaded.
    """
    console = console or make_console()
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    folder = report.check_out_folder(config["out"])
    cells = [decode_grid.parse_cell(cell) for cell in config["cells"]]
    new_tokens = 64 + 2 * config["steps"] * len(config["backends"])
    with console.status(f"loading {config['model']}"):
        engine = decode_grid.make_engine(config, cells, new_tokens=new_tokens)
    if warmup_only:
        warm_up(engine, console)
        return []
    rows = []
    for cell in cells:
        decode_grid.fill(engine, cell, suffix_tokens=config["suffix_tokens"], new_tokens=new_tokens)
        for backend in config["backends"]:
            with console.status(f"{cell}, {backend}"):
                found = profile_loop(engine, config["steps"], decode_grid.named(backend))
            step = per_step(found, config["steps"])
            longest = list(found.names.items())[:12]
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
                    "kernels": {name: ms / config["steps"] for name, ms in longest},
                }
            )
        decode_grid.empty(engine)
    path = report.write_result(folder, "profile", config, rows)
    console.print(_table(config, rows))
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


if __name__ == "__main__":
    WARMUP = shared_flags.define_warmup()
    shared_flags.run_config(lambda config: profile(config, warmup_only=WARMUP.value))
