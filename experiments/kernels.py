"""Times the kernels on shapes of real models, against the ceilings of the device in the same run.

    python -m experiments.kernels --out=out/kernels          # the cases below, a table, a picture
    python -m experiments.kernels --tune=all                 # search the knobs, write tuning/DEVICE.json
    python -m experiments.kernels --only='dense|suffix'      # cases whose names match

Needs a GPU; cases named ``baseline`` also need jax-triton. A fraction of the matmul rate or of the
roofline is a fraction of what this run measured, never of a data sheet. ``µs`` is the time of a run in
a jitted loop; ``in kernels`` what of it the GPU spent inside the kernels, which is the whole of it
once the host launches ahead.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.console
from absl import flags

from experiments import flags as shared_flags
from experiments import kernel_picture, report
from experiments.kernel_cases import Case
from experiments.kernel_sweep import cases
from experiments.kernel_timing import (
    Ceilings,
    TimedLoop,
    compile_all,
    compile_loop,
    measure_ceilings,
)
from experiments.kernel_tuning import OPS, tune
from kvgrain_jax.errors import ConfigError

TUNE = flags.DEFINE_enum(
    "tune", None, ["all", *OPS], "Search an operation's knobs and write tuning/DEVICE.json first."
)
ONLY = flags.DEFINE_string("only", "", "Regular expression: time the cases whose names match.")
WITH = flags.DEFINE_string("with", "", "Regular expression: time the implementations that match.")

COLUMNS = (
    "case",
    "implementation",
    "µs",
    "in kernels",
    "TFLOP/s",
    "TB/s",
    "roofline",
    "bar µs",
    "met",
    "speedup over",
)


def _make(
    makers: list[tuple[str, Callable[[], Case]]],
) -> tuple[list[Case], list[dict[str, Any]]]:
    """Cases, and a row with the reason for each that needs a package which is not installed."""
    made, missing = [], []
    for name, make in makers:
        try:
            made.append(make())
        except ImportError as error:
            missing.append({"case": name, "implementation": "-", "error": str(error)})
    return made, missing


def measure(
    case: Case,
    implementation: str,
    loop: TimedLoop | Exception,
    ceilings: Ceilings,
    rows: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Times one implementation of a case; one that could not compile gives a row with its error.

    ``rows`` were measured before, for bars that are multiples of another case's time.
    """
    row: dict[str, Any] = {"case": case.name, "implementation": implementation}
    if isinstance(loop, Exception):
        return row | {"error": f"{type(loop).__name__}: {loop}"[:400]}
    us = loop.microseconds(repeats=7)
    kernels = loop.kernels()
    device_us = sum(us for _, us in kernels) if kernels else None
    row |= {
        "us": us,
        "device_us": device_us,
        "kernels": [(name, round(us, 2)) for name, us in kernels or ()],
        "tflops": case.flops / us / 1e6,
        "tb_s": case.n_bytes / us / 1e6,
        "of_matmul": case.flops / us * 1e6 / ceilings.matmul,
        "of_roofline": ceilings.floor(case.flops, case.n_bytes) / us,
        "speedup_over": {name: peer / us for name, peer in case.peers.items()},
    }
    limit = _limit(case, ceilings, rows)
    if case.bar is not None and limit is not None:
        kind, value = case.bar
        row |= {"bar": f"{kind} {value:.4g}", "bar_us": limit, "met": us <= limit}
        row |= {"device_met": device_us is not None and device_us <= limit}
    return row


def _limit(case: Case, ceilings: Ceilings, rows: Sequence[dict[str, Any]]) -> float | None:
    """Microseconds that the case's bar allows; None without a bar or what it is held against."""
    if case.bar is None:
        return None
    kind, value = case.bar
    if kind == "us":
        return value
    if kind == "matmul":
        return case.flops / (value * ceilings.matmul) * 1e6
    times = [row["us"] for row in rows if row["case"] == kind and "us" in row]
    return value * min(times) if times else None


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the terminal's table."""
    if "error" in row:
        return [row["case"], row["implementation"], row["error"][:60], *[""] * 7]
    return [
        row["case"],
        row["implementation"],
        f"{row['us']:.1f}",
        "-" if row["device_us"] is None else f"{row['device_us']:.1f}",
        f"{row['tflops']:.0f}",
        f"{row['tb_s']:.2f}",
        f"{row['of_roofline']:.2f}",
        f"{row['bar_us']:.1f}" if "bar_us" in row else "",
        _met(row),
        ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["speedup_over"].items()),
    ]


def _met(row: dict[str, Any]) -> str:
    if "met" not in row:
        return ""
    return "yes" if row["met"] else "in kernels" if row["device_met"] else "no"


def main() -> int:
    """Runs the binary; 1 where no case was measured."""
    if jax.default_backend() != "gpu":
        raise ConfigError("experiments.kernels times GPU kernels; JAX sees no GPU here.")
    folder = report.check_out_folder(shared_flags.OUT.value or "out/kernels")
    console = rich.console.Console(width=160)
    ceilings = measure_ceilings()
    console.print(
        f"{jax.devices()[0].device_kind}: matmul {ceilings.matmul / 1e12:.0f} TFLOP/s, copy "
        f"{ceilings.copy / 1e12:.2f} TB/s, read {ceilings.read / 1e12:.2f} TB/s"
    )
    tuned = tune(console.print, OPS if TUNE.value == "all" else [TUNE.value]) if TUNE.value else {}
    chosen, rows = _make([case for case in cases() if re.search(ONLY.value, case[0])])
    work = [(case, name) for case in chosen for name in case.steps if re.search(WITH.value, name)]
    loops = compile_all(
        [
            lambda case=case, name=name: compile_loop(
                case.steps[name], case.args, in_place=case.in_place, n_turns=case.n_turns
            )
            for case, name in work
        ]
    )
    config = {"only": ONLY.value, "with": WITH.value, "tune": TUNE.value}
    for (case, name), loop in zip(work, loops, strict=True):
        rows.append(measure(case, name, loop, ceilings, rows))
        console.print(json.dumps(rows[-1]), soft_wrap=True, highlight=False)
        # Written after each row: an interrupted run keeps what it measured.
        report.write_result(folder, "kernels", config, rows, ceilings=ceilings, tuned=tuned)
    console.print(report.table("Kernels", COLUMNS, [cells(row) for row in rows]))
    timed = [row for row in rows if "us" in row]
    if not timed:
        console.print("No case was measured.")
        return 1
    kernel_picture.roofline(timed, ceilings, folder / "roofline.png")
    console.print(f"Wrote {folder / 'result.json'} and roofline.png.")
    return 0


if __name__ == "__main__":
    shared_flags.run(main)
