"""Runs one serving experiment of the Tangram paper: throughput, prefill latency, TTFT, both axes.

    python -m experiments.tangram --config=configs/tangram/throughput.py --config.profile.path=FILE.npz
    python -m experiments.tangram --config=configs/tangram/throughput.py:qwen2.5-7b \\
        --config.profile.path=FILE.npz
    python -m experiments.tangram --config=configs/tangram/throughput.py:smoke       # tiny, on a CPU

What leaves is a folder with ``table.md``, ``result.json`` and ``picture.png``, and one file in ``cells`` for
each finished cell, printed when it is. Ctrl-C ends a run and renders what is there; the same command
goes on where it stopped. ``--fresh`` measures all of it again; ``--render`` measures nothing. The fields
of a config are listed in ``experiments.tangram_spec``, the systems in ``experiments.tangram_systems``.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import rich.console
import rich.markdown
from absl import flags
from ml_collections import config_flags

from experiments import flags as shared_flags
from experiments import report, tangram_spec, tangram_table
from experiments.serve import make_console
from experiments.table_spec import Unit
from experiments.table_store import Store
from experiments.tangram_axes import measure_axes
from experiments.tangram_prefill import measure_prefill
from experiments.tangram_serving import measure_throughput, measure_ttft
from experiments.tangram_systems import Bench, free_memory, make_bench
from kvgrain_jax.errors import KVGrainError

MEASURES: dict[str, Callable[[Mapping[str, Any], Bench], dict[str, Any]]] = {
    "throughput": measure_throughput,
    "prefill": measure_prefill,
    "ttft": measure_ttft,
    "axes": measure_axes,
}


def tangram(
    config: Mapping[str, Any],
    console: rich.console.Console | None = None,
    *,
    fresh: bool = False,
    render_only: bool = False,
) -> int:
    """Measures what is not yet measured and renders the table.

    Args:
      config: see ``experiments.tangram_spec``.
      console: where progress and the table go.
      fresh: measure again what is there.
      render_only: measure nothing.

    Returns:
      Exit code: 0; 1 where a cell failed; 130 after Ctrl-C.

    Raises:
      ConfigError: the config is wrong, the profile is missing, or the device is not up to it.
    """
    console = console or make_console()
    work = tangram_spec.units(config, tuple(MEASURES))
    store = Store(report.check_out_folder(config["out"]))
    found = {unit.name: None if fresh else store.read(unit) for unit in work}
    failures: dict[str, str] = {}
    complete = True
    if not render_only and not all(found.values()):
        tangram_spec.check_device(config)
        complete = _measure(config, work, found, store, failures, console)
    _render(config, work, found, failures, store.folder, console)
    if not complete:
        console.print("[bold]Interrupted:[/bold] the same command goes on from here.")
        return shared_flags.INTERRUPTED
    return int(bool(failures))


def _measure(
    config: Mapping[str, Any],
    work: list[Unit],
    found: dict[str, dict[str, Any] | None],
    store: Store,
    failures: dict[str, str],
    console: rich.console.Console,
) -> bool:
    """Fills ``found`` and ``failures``; False where the user interrupted it."""
    with console.status(f"loading {config['model']}"):
        bench = make_bench(config)
    console.print(f"Demands of the heads: {bench.demands.source}")
    for unit in work:
        if found[unit.name] is not None:
            continue
        try:
            with console.status(unit.name):
                result = MEASURES[config["measure"]](unit.cell, bench)
        except (KVGrainError, jax.errors.JaxRuntimeError) as error:
            # One cell that does not fit must not end the run.
            failures[unit.name] = " ".join(str(error).split())[:400]
            console.print(f"{unit.name}: failed, {failures[unit.name]}")
            continue
        except KeyboardInterrupt:
            return False
        finally:
            free_memory()
        answers = result.pop("answers", {})
        kept = {"metrics": result, "answers": answers, "demands": bench.demands.source}
        found[unit.name] = store.write(unit, kept)
        console.print(f"{unit.name}: {tangram_table.in_words(result)}")
    return True


def _render(
    config: Mapping[str, Any],
    work: list[Unit],
    found: Mapping[str, dict[str, Any] | None],
    failures: Mapping[str, str],
    folder: pathlib.Path,
    console: rich.console.Console,
) -> None:
    measured = [(unit, result) for unit in work if (result := found[unit.name]) is not None]
    rows = [
        {
            **{axis: unit.cell[axis] for axis in dict.fromkeys((*config["axes"], "system"))},
            **result["metrics"],
            **tangram_table.agreement(result, measured),
        }
        for unit, result in measured
    ]
    origins = [result for _, result in measured]
    text = tangram_table.render(
        config, rows, origins, failures=failures, pending=len(work) - len(rows) - len(failures)
    )
    (folder / "table.md").write_text(text, encoding="utf-8")
    first = origins[0] if origins else {}
    origin = {
        key: first[key] for key in ("device", "versions", "commit", "demands") if key in first
    }
    report.write_result(folder, "tangram", config, rows, failures=failures, **origin)
    console.print(rich.markdown.Markdown(text))
    written = [folder / "table.md", folder / "result.json"]
    if rows:
        from experiments import tangram_picture  # matplotlib takes a second to import

        tangram_picture.draw(folder / "picture.png", config, rows)
        written.append(folder / "picture.png")
    console.print(f"Written: {', '.join(map(str, written))}")


def main(config: Mapping[str, Any], out: str | None, *, fresh: bool, render_only: bool) -> int:
    """Applies ``--out`` to a config and runs it."""
    fields = dict(config)
    if out is not None:
        fields["out"] = out
    return tangram(fields, fresh=fresh, render_only=render_only)


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_file("config", None, "File with a get_config().")
    FRESH = flags.DEFINE_bool("fresh", False, "Measure again what is already there.")
    RENDER = flags.DEFINE_bool("render", False, "Measure nothing; render what is there.")
    flags.adopt_module_key_flags(shared_flags)
    flags.mark_flag_as_required("config")
    shared_flags.run(
        lambda: main(
            shared_flags.read_config(CONFIG),
            shared_flags.OUT.value,
            fresh=FRESH.value,
            render_only=RENDER.value,
        )
    )
