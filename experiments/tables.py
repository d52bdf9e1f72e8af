"""Runs one table or figure of the GraniKV paper and renders its numbers beside ours.

    python -m experiments.tables --config=configs/granikv/grid_llama8b.py            # full size
    python -m experiments.tables --config=configs/granikv/grid_llama8b.py:headline   # fewer cells
    python -m experiments.tables --config=configs/granikv/grid_llama8b.py:smoke      # tiny, on a CPU
    python -m experiments.tables --summary                # the paper's claims, from results that exist

What leaves is a folder with ``table.md``, ``result.json`` and ``table.png``, and one file in ``cells`` for
each finished measurement. Ctrl-C ends a run and renders what is there; the same command goes on where
it stopped, and a full run takes over the cells of a headline run. ``--fresh`` measures all of it again;
``--render`` measures nothing, ``--warmup`` only compiles. The fields of a config are listed in ``experiments.table_spec``.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.markdown
import rich.progress
from absl import flags
from ml_collections import config_flags

import models
from experiments import flags as shared_flags
from experiments import (
    report,
    table_dispatch,
    table_kernels,
    table_markdown,
    table_profile,
    table_rows,
    table_serving,
    table_spec,
    table_steps,
    table_summary,
    table_workloads,
)
from experiments.running import warm_up
from experiments.serve import make_console
from experiments.table_spec import Unit
from experiments.table_store import Store
from kvgrain_jax import Engine, sharding
from kvgrain_jax.errors import ConfigError, KVGrainError

METHODS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "poisson": table_serving.measure,
    "burst": table_serving.measure,
    "replay": table_serving.measure,
    "steps": table_steps.measure,
    "paired": table_dispatch.measure,
    "kernels": table_kernels.measure,
    "profile": table_profile.measure,
}

type Measured = list[tuple[Unit, dict[str, Any]]]


def run_table(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    fresh: bool = False,
    render_only: bool = False,
    warmup_only: bool = False,
) -> int:
    """Measures what is not yet measured and renders the table.

    Args:
      config: see ``experiments.table_spec``.
      console: where progress and the table go.
      fresh: measure again what is there.
      render_only: measure nothing.
      warmup_only: compile the programs of every engine of the table; measure and render nothing.

    Returns:
      Exit code: 0; 1 where a measurement failed or variants that had to agree did not; 130 after
      Ctrl-C.

    Raises:
      ConfigError: the config is wrong, a file is missing, or the device is not up to it; found out
        before anything is loaded.
    """
    console = console or make_console()
    work = table_spec.units(config)
    store = Store(report.check_out_folder(config["out"]))
    found = {unit.name: None if fresh else store.read(unit) for unit in work}
    work = [u for u in work if found[u.name] or not table_rows.lacks_devices(u.cell)]
    pending = [unit for unit in work if found[unit.name] is None]
    if warmup_only:
        _warm_up(config, pending, console)
        return 0
    failures: dict[str, str] = {}
    complete = True
    if pending and not render_only:
        table_spec.check_device(config, pending)
        for unit in pending:
            if METHODS[unit.cell["how"]] is table_serving.measure:
                table_workloads.prepare_cell(unit.cell, unit.repetition)
        complete = _measure(work, found, store, failures, console)
    measured = [(unit, result) for unit in work if (result := found[unit.name]) is not None]
    disagree = _render(config, work, measured, store.folder, failures, console)
    if not complete:
        console.print("[bold]Interrupted:[/bold] the same command goes on from here.")
        return shared_flags.INTERRUPTED
    return int(bool(failures) or (config["must_agree"] and disagree))


def _warm_up(
    config: Mapping[str, Any], pending: Sequence[Unit], console: rich.console.Console
) -> None:
    """Compiles the programs of the engines of what is still to be measured."""
    table_spec.check_device(config, pending)
    engines = {
        (unit.model, unit.dtype, unit.cell["tp"], unit.engine): unit.name
        for unit in reversed(pending)
        if unit.engine is not None
    }
    for (model, dtype, tp, engine), name in reversed(engines.items()):
        console.print(f"{name}:")
        warm_up(Engine(load_model(model, dtype, tp).model, engine), console)


def _measure(
    work: Sequence[Unit],
    found: dict[str, dict[str, Any] | None],
    store: Store,
    failures: dict[str, str],
    console: rich.console.Console,
) -> bool:
    """Fills ``found`` and ``failures``; False where the user interrupted it."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[state]}"),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(work), state="")
        for unit in work:
            bar.update(task, description=unit.name)
            if found[unit.name] is None:
                state = functools.partial(_show_state, bar, task)
                try:
                    result = METHODS[unit.cell["how"]](unit, load_model, state)
                except (KVGrainError, jax.errors.JaxRuntimeError) as error:
                    # One cell that does not fit must not end a run of hours.
                    failures[unit.name] = " ".join(str(error).split())[:400]
                    bar.advance(task)
                    continue
                except KeyboardInterrupt:
                    return False
                if result is None:
                    return False
                found[unit.name] = store.write(unit, result)
            bar.advance(task)
    return True


def _show_state(bar: rich.progress.Progress, task: rich.progress.TaskID, text: str) -> None:
    bar.update(task, state=text)


@functools.lru_cache(maxsize=1)
def load_model(source: str, dtype: str, tp: int) -> models.LoadedModel:
    """The model of a source on ``tp`` devices; the last one stays loaded and compiled."""
    mesh = sharding.make_mesh(tp) if tp > 1 else None
    return models.load(source, dtype=dtype, mesh=mesh)


def _render(
    config: Mapping[str, Any],
    work: Sequence[Unit],
    measured: Measured,
    folder: pathlib.Path,
    failures: Mapping[str, str],
    console: rich.console.Console,
) -> bool:
    """Writes the table; whether variants gave different tokens."""
    rows = table_rows.make_rows(config, measured)
    agreements = table_rows.agreement(config, measured)
    origins = [result for _, result in measured]
    pending = len(work) - len(measured) - len(failures)
    text = table_markdown.render(
        config, rows, agreements, origins, failures=failures, pending=pending
    )
    (folder / "table.md").write_text(text, encoding="utf-8")
    first = origins[0] if origins else {}
    report.write_result(
        folder,
        "tables",
        config,
        rows,
        agreement=agreements,
        failures=failures,
        pending=pending,
        facts=_facts(measured),
        **{key: first[key] for key in ("device", "versions", "commit") if key in first},
    )
    console.print(rich.markdown.Markdown(text))
    written = [folder / "table.md", folder / "result.json"]
    if measured:
        written += _draw(folder / "table.png", config, rows, measured, console)
    console.print(f"Written: {', '.join(map(str, written))}")
    return any(entry["same"] < entry["compared"] for entry in agreements)


def _facts(measured: Measured) -> dict[str, Any]:
    """What is to be known of replayed traces, by the name of the trace."""
    return {
        unit.cell["trace"]: result["facts"] for unit, result in measured if "trace" in unit.cell
    }


def _draw(
    path: pathlib.Path,
    config: Mapping[str, Any],
    rows: Sequence[table_rows.Row],
    measured: Measured,
    console: rich.console.Console,
) -> list[pathlib.Path]:
    try:
        from experiments import table_pictures
    except ImportError as error:
        console.print(f"No picture: {error}. Install kvgrain-jax[plots], then --render.")
        return []
    # Requests tell more than steps: the last cell that was served, if any was.
    served = [unit for unit, result in measured if result.get("answers")]
    last = (served or [unit for unit, _ in measured])[-1].cell
    series = {u.variant: r.get("series", {}) for u, r in measured if u.cell == last}
    table_pictures.draw(path, config, rows, series)
    return [path]


def main(
    config: Mapping[str, Any] | None,
    out: str | None,
    *,
    fresh: bool,
    render_only: bool,
    warmup_only: bool = False,
    summary: bool,
    results: str,
) -> int:
    """Runs a config, or prints the summary of all claims and writes it into REPRODUCE.md."""
    if summary:
        text = table_summary.render(pathlib.Path(results))
        table_summary.write(text, pathlib.Path(out or table_summary.REPRODUCE))
        make_console().print(rich.markdown.Markdown(text))
        return 0
    if config is None:
        raise ConfigError(
            "Give a table with --config=configs/granikv/NAME.py, or ask for the --summary. The "
            f"tables are {', '.join(table_summary.table_names())}."
        )
    fields = dict(config)
    if out is not None:
        fields["out"] = out
    return run_table(fields, fresh=fresh, render_only=render_only, warmup_only=warmup_only)


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_file("config", None, "File with a get_config(); see above.")
    FRESH = flags.DEFINE_bool("fresh", False, "Measure again what is already there.")
    RENDER = flags.DEFINE_bool("render", False, "Measure nothing; render what is there.")
    SUMMARY = flags.DEFINE_bool("summary", False, "The paper's claims against ours.")
    RESULTS = flags.DEFINE_string(
        "results", "results/h200/granikv", "Folder of the results that --summary reads."
    )
    WARMUP = shared_flags.define_warmup()
    flags.adopt_module_key_flags(shared_flags)
    shared_flags.run(
        lambda: main(
            None if CONFIG.value is None else shared_flags.read_config(CONFIG),
            shared_flags.OUT.value,
            fresh=FRESH.value,
            render_only=RENDER.value,
            warmup_only=WARMUP.value,
            summary=SUMMARY.value,
            results=RESULTS.value,
        )
    )
