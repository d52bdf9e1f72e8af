"""Serves one workload on several systems and shows them side by side.

    python -m experiments.serve --config=configs/demo.py
    python -m experiments.serve --config=configs/trace.py --trace=conversation_trace.jsonl

With ``--warmup`` it only compiles what the systems need, for later starts.

Fields of a config (``--config.FIELD=VALUE`` changes one):
  model         name, file, folder or ``random:NAME``, see ``models.load``.
  dtype         dtype of the weights.
  systems       names of the systems, run one after another.
  engine        fields of ``EngineConfig`` for all of them.
  workload      see ``experiments.workloads``.
  must_agree    exit with code 1 unless all systems generate the same tokens.
  out           folder for ``result.json`` and ``serve.png``.

Ctrl-C ends the run; what was measured until then is written.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.markup
import rich.progress
from absl import flags
from ml_collections import config_flags

import models
from experiments import flags as shared_flags
from experiments import report, workloads
from experiments.running import (
    Difference,
    SystemRun,
    engine_configs,
    first_difference,
    run_system,
    warm_up,
)
from experiments.workloads import Target, Workload
from kvgrain_jax.engine import Engine, EngineConfig, Model, TokenEvent
from kvgrain_jax.errors import ConfigError

FIELDS = ("model", "dtype", "systems", "engine", "workload", "must_agree", "out")


def serve(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    warmup_only: bool = False,
) -> int:
    """Runs a config.

    Args:
      config: see the module's docstring.
      console: where tables and progress go.
      warmup_only: compile the programs of the systems and serve nothing.

    Returns:
      Exit code: 0, 1 where systems had to agree and did not, 130 after Ctrl-C.

    Raises:
      ConfigError: the config is wrong; found out before anything is loaded.
    """
    console = console or make_console()
    if unknown := sorted(set(config) - set(FIELDS)):
        raise ConfigError(
            f"A config of serve has no field {', '.join(unknown)}; it has {', '.join(FIELDS)}."
        )
    if missing := sorted(set(FIELDS) - set(config)):
        raise ConfigError(f"The config lacks {', '.join(missing)}.")
    systems = engine_configs(config["systems"], config["engine"])
    make_workload = workloads.prepare(config["workload"])
    folder = report.check_out_folder(config["out"])

    with console.status(f"loading {config['model']}"):
        loaded = models.load(config["model"], dtype=config["dtype"])
    if warmup_only:
        for name, system in systems.items():
            console.print(f"{name}:")
            warm_up(Engine(loaded.model, system), console)
        return 0
    context = next(iter(systems.values())).max_context or loaded.model.max_context
    target = Target(
        loaded.model.vocabulary, min(context, loaded.model.max_context), loaded.tokenizer
    )
    workload = make_workload(target)
    runs = _run_all(loaded.model, systems, workload, console)

    metrics = {name: run.metrics for name, run in runs.items()}
    difference = first_difference(metrics)
    complete = len(runs) == len(systems) and all(run.complete for run in runs.values())
    compared = _compared(runs)
    rows = [_row(name, run, workload) for name, run in runs.items()]
    path = report.write_result(
        folder,
        "serve",
        config,
        rows,
        workload=workload.facts,
        complete=complete,
        requests_compared=compared,
        first_difference=difference,
    )
    if runs:
        from experiments.pictures import draw_runs  # matplotlib takes a second to import

        draw_runs(folder / "serve.png", _title(config, workload), metrics)
        _show_answers(workload, runs, loaded.tokenizer, console)
        _show_facts(workload, console)
        console.print(_table(metrics))
        _show_agreement(difference, len(runs), compared, console)
    console.print(f"Written: {path} and {folder / 'serve.png'}" if runs else f"Written: {path}")
    if not complete:
        console.print("[bold]Interrupted:[/bold] the figures are of what was served until then.")
        return shared_flags.INTERRUPTED
    return int(bool(config["must_agree"] and difference))


def make_console() -> rich.console.Console:
    """The terminal; 100 columns wide where the output goes into a file."""
    console = rich.console.Console(highlight=False)
    return console if console.is_terminal else rich.console.Console(highlight=False, width=100)


def _run_all(
    model: Model,
    systems: Mapping[str, EngineConfig],
    workload: Workload,
    console: rich.console.Console,
) -> dict[str, SystemRun]:
    runs: dict[str, SystemRun] = {}
    columns = (
        rich.progress.TextColumn("{task.fields[system]:<10} {task.description:<9}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.completed}/{task.total} {task.fields[unit]}"),
        rich.progress.TextColumn("{task.fields[tokens]} tokens"),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as progress:
        for name, config in systems.items():
            task = progress.add_task("compiling", system=name, unit="programs", tokens=0)

            def on_event(event: TokenEvent, task=task) -> None:
                fields = progress.tasks[task].fields
                progress.update(
                    task,
                    advance=int(event.finished),
                    tokens=fields["tokens"] + len(event.tokens),
                )

            def on_program(_: str, done: int, total: int, task=task) -> None:
                progress.update(task, completed=done, total=total)

            def on_start(task=task, name=name) -> None:
                total = len(workload.requests)
                fields = {"system": name, "unit": "requests", "tokens": 0}
                progress.reset(task, description="serving", total=total, **fields)

            runs[name] = run_system(
                model, config, workload.requests, on_event, on_start, on_program
            )
            progress.update(task, description="served" if runs[name].complete else "stopped")
            if not runs[name].complete:
                break
    return runs


def _row(name: str, run: SystemRun, workload: Workload) -> dict[str, Any]:
    requests = [
        {
            "id": r.id,
            "group": workload.groups[r.id],
            "arrival_s": r.arrival,
            "ttft_s": r.ttft,
            "tpot_s": r.tpot,
            "prompt_tokens": r.prompt_tokens,
            "cached_tokens": r.cached_tokens,
            "reason": r.reason,
            "tokens": r.tokens,
        }
        for r in run.metrics.requests
    ]
    return {
        "system": name,
        **run.metrics.summary(),
        "warmup_s": run.warmup_s,
        "complete": run.complete,
        "per_request": requests,
    }


def _compared(runs: Mapping[str, SystemRun]) -> int:
    finished = [{r.id for r in run.metrics.requests} for run in runs.values()]
    return len(set.intersection(*finished)) if len(finished) > 1 else 0


def _title(config: Mapping[str, Any], workload: Workload) -> str:
    count = f"{config['model']}: {len(workload.requests)} requests"
    if workload.facts["kind"] == "trace":
        return f"{count} of {pathlib.Path(config['workload']['path']).name}"
    groups = len(set(workload.groups.values()))
    prefixes = "one prefix" if groups == 1 else f"{groups} prefixes"
    return f"{count} over {prefixes} ({workload.facts['kind']})"


def _table(runs: Mapping[str, Any]):
    summaries = [run.summary() for run in runs.values()]

    def line(label: str, show) -> list[str]:
        return [label, *(show(summary) for summary in summaries)]

    def backends(summary: Mapping[str, Any]) -> str:
        parts = summary["backend_fractions"].items()
        return ", ".join(f"{name} {share:.0%}" for name, share in parts) or "-"

    def pair(first: str, second: str, show):
        return lambda s: f"{show(s[first])} / {show(s[second])}"

    rows = [
        line("requests", lambda s: str(s["requests"])),
        line("output tokens/s", lambda s: f"{s['output_tokens_per_s']:.1f}"),
        line("TTFT p50 / p99, ms", pair("ttft_p50_s", "ttft_p99_s", report.milliseconds)),
        line("TPOT p50 / p99, ms", pair("tpot_p50_s", "tpot_p99_s", report.milliseconds)),
        line("prefix KV stored, MiB", lambda s: report.mebibytes(s["prefix_bytes_stored"])),
        line("prefix KV read/step, MiB", _read_per_step),
        line("HOT / COLD peak, tokens", pair("peak_hot_tokens", "peak_cold_tokens", str)),
        line("prompt tokens from cache", _cached),
        line("decode steps", lambda s: str(s["decode_steps"])),
        line("backend of steps", backends),
    ]
    return report.table("", ["", *runs], rows)


def _read_per_step(summary: Mapping[str, Any]) -> str:
    return report.mebibytes(summary["prefix_bytes_read_per_step"])


def _cached(summary: Mapping[str, Any]) -> str:
    total = summary["prompt_tokens"]
    return f"{summary['cached_tokens'] / total:.0%}" if total else "-"


def _show_answers(
    workload: Workload, runs: Mapping[str, SystemRun], tokenizer: Any, console: rich.console.Console
) -> None:
    """One answer of each agent, of the last system that ran."""
    if not workload.questions:
        return
    shown: set[str] = set()
    for request in list(runs.values())[-1].metrics.requests:
        group = workload.groups[request.id]
        if group in shown:
            continue
        shown.add(group)
        answer = tokenizer.decode(list(request.tokens)).strip()
        ending = " […]" if request.reason == "length" else ""
        question = rich.markup.escape(workload.questions[request.id])
        console.print(f"[bold]{group}[/bold] was asked: {question}")
        console.print(f"{answer}{ending}\n", markup=False)


def _show_facts(workload: Workload, console: rich.console.Console) -> None:
    facts = workload.facts
    if facts["kind"] != "trace":
        return
    console.print(
        f"Replayed {facts['replayed_requests']} of {facts['trace_requests']} requests of the trace; "
        f"prompt lengths are multiplied by {facts['length_scale']:.4g}."
    )
    cut = [facts[f"{what}_cut_to_context"] for what in ("prompts", "outputs")]
    if any(cut):
        console.print(
            f"Cut to the context of {facts['max_context']} tokens: prompts of {cut[0]} requests, "
            f"outputs of {cut[1]}."
        )


def _show_agreement(
    difference: Difference | None, systems: int, compared: int, console: rich.console.Console
) -> None:
    if difference:
        console.print(f"[bold red]The systems differ[/bold red], first in {difference}.")
    elif systems > 1 and compared:
        console.print(
            f"[bold]Identical tokens:[/bold] all {systems} systems gave the same tokens for "
            f"{'the' if compared == 1 else f'all {compared}'} "
            f"request{'' if compared == 1 else 's'} that they all finished."
        )


def main(
    config: Mapping[str, Any], trace: str | None, out: str | None, *, warmup_only: bool = False
) -> int:
    """Applies ``--trace`` and ``--out`` to a config and runs it."""
    fields = dict(config)
    if trace is not None:
        workload = fields.get("workload", {})
        kept = workload if workload.get("kind") == "trace" else {"kind": "trace"}
        fields["workload"] = {**kept, "path": trace}
    if out is not None:
        fields["out"] = out
    return serve(fields, warmup_only=warmup_only)


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_file("config", None, "File with a get_config().")
    TRACE = flags.DEFINE_string("trace", None, "Trace file to replay instead of the workload.")
    WARMUP = shared_flags.define_warmup()
    flags.adopt_module_key_flags(shared_flags)
    flags.mark_flag_as_required("config")
    shared_flags.run(
        lambda: main(
            shared_flags.read_config(CONFIG),
            TRACE.value,
            shared_flags.OUT.value,
            warmup_only=WARMUP.value,
        )
    )
