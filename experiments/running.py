"""Runs one workload on one system after another, and compares what they answered.

What enters is a model, an engine configuration and requests; what leaves are ``RunMetrics``. The
binaries that run engines share these pieces.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
import rich.progress

from kvgrain_jax.engine import Engine, EngineConfig, Model, Request, RunMetrics, TokenEvent
from kvgrain_jax.engine import system_config as named_system
from kvgrain_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SystemRun:
    """One workload on one system.

    Attributes:
      metrics: what was measured.
      warmup_s: seconds that compilation took before the clock started.
      complete: False where the user interrupted it.
    """

    metrics: RunMetrics
    warmup_s: float
    complete: bool


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token in which two systems differ.

    Attributes:
      request: id of the request.
      position: index of the generated token.
      systems: names of the two systems.
      tokens: what each of them generated there; None where it had ended.
    """

    request: str
    position: int
    systems: tuple[str, str]
    tokens: tuple[int | None, int | None]

    def __str__(self) -> str:
        first, second = ("nothing" if t is None else f"token {t}" for t in self.tokens)
        return (
            f"request {self.request}, generated token {self.position}: {self.systems[0]} gave "
            f"{first}, {self.systems[1]} gave {second}"
        )


def engine_configs(
    systems: Sequence[str], overrides: Mapping[str, Any] | None = None
) -> dict[str, EngineConfig]:
    """Configurations of named systems.

    Args:
      systems: names, see ``kvgrain_jax.engine.SYSTEMS``.
      overrides: fields of ``EngineConfig`` for all of them.

    Raises:
      ConfigError: no system, a name twice, an unknown name or field, or a value out of range.
    """
    if not systems:
        raise ConfigError("config.systems is empty; name at least one system.")
    if len(set(systems)) < len(systems):
        raise ConfigError(f"config.systems names one system twice: {', '.join(systems)}.")
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in dict(overrides or {}).items()
    }
    return {name: named_system(name, **fields) for name in systems}


def run_system(
    model: Model,
    config: EngineConfig,
    requests: Sequence[Request],
    on_event: Callable[[TokenEvent], None] | None = None,
    on_start: Callable[[], None] | None = None,
    on_program: Callable[[str, int, int], None] | None = None,
) -> SystemRun:
    """Builds an engine, compiles its programs, serves the requests, and frees it.

    Ctrl-C ends the run; what was measured until then is returned.

    Args:
      model: the language model.
      config: the system.
      requests: the workload.
      on_event: called for new tokens.
      on_start: called when compilation is done and the clock starts.
      on_program: called before each program is compiled, see ``Engine.warmup``.

    Raises:
      ConfigError: model and configuration do not fit together.
      RequestError: a request can never be served.
    """
    engine = Engine(model, config)
    begin = time.perf_counter()
    warmup_s = float("nan")
    try:
        engine.warmup(on_program)
        warmup_s = time.perf_counter() - begin
        if on_start:
            on_start()
        engine.run(requests, on_event)
        complete = True
    except KeyboardInterrupt:
        complete = False
    metrics = engine.metrics
    # The pools are most of the memory, and the next system allocates its own.
    del engine
    gc.collect()
    return SystemRun(metrics, warmup_s, complete)


def warm_up(engine: Engine, console: rich.console.Console) -> float:
    """Compiles the programs of an engine, with a progress bar.

    Returns:
      Seconds.
    """
    begin = time.perf_counter()
    columns = (
        rich.progress.TextColumn("compiling"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("")

        def on_program(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        engine.warmup(on_program)
        total = bar.tasks[task].total
        bar.update(task, description="", completed=total)
    seconds = time.perf_counter() - begin
    console.print(f"Compiled {total:.0f} programs in {seconds:.1f} s.")
    return seconds


def first_difference(runs: Mapping[str, RunMetrics]) -> Difference | None:
    """The first generated token in which a system differs from the first one.

    Only requests that both have finished are compared.
    """
    answers = {name: {r.id: r.tokens for r in run.requests} for name, run in runs.items()}
    names = list(answers)
    for name in names[1:]:
        for request, expected in answers[names[0]].items():
            found = answers[name].get(request)
            if found is None or found == expected:
                continue
            same = [a == b for a, b in zip(expected, found, strict=False)]
            position = same.index(False) if False in same else len(same)
            tokens = (_token(expected, position), _token(found, position))
            return Difference(request, position, (names[0], name), tokens)
    return None


def _token(tokens: tuple[int, ...], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
