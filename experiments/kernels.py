"""Times the kernels on shapes of real models, against the ceilings of the device in the same run.

    python -m experiments.kernels --out=out/kernels          # the cases below, a table, a picture
    python -m experiments.kernels --tune                     # search the knobs, write tuning/DEVICE.json
    python -m experiments.kernels --only='dense|suffix'      # cases whose names match

Needs a GPU; cases named ``baseline`` also need jax-triton. A fraction of the matmul rate or of the
roofline is a fraction of what this run measured, never of a data sheet. ``µs`` is the time of a run in
a jitted loop; ``in kernels`` what of it the GPU spent inside the kernels, which is the whole of it
once the host launches ahead.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import rich.console
from absl import flags

from experiments import flags as shared_flags
from experiments import kernel_picture, report
from experiments.kernel_cases import (
    ARG_SPECS,
    LLAMA,
    QWEN_RANK,
    Case,
    append_case,
    prefix_case,
    suffix_case,
    whole_case,
)
from experiments.kernel_timing import (
    Ceilings,
    TimedLoop,
    compile_all,
    compile_loop,
    measure_ceilings,
)
from experiments.kernel_tuning import tune
from kvgrain_jax.errors import ConfigError

TUNE = flags.DEFINE_bool("tune", False, "Search the knobs and write tuning/DEVICE.json first.")
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


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names and makers of the cases; only those that are chosen are made."""
    everywhere = ("mosaic", "triton", "xla")
    for prefix, bar, peer in ((16384, 0.85, 189.0), (8192, 0.75, 103.0), (2048, 0.55, 43.0)):
        yield (
            f"dense prefix B256 P{prefix}",
            lambda p=prefix, b=bar, f=peer: prefix_case(
                f"dense prefix B256 P{p}",
                LLAMA,
                [(256, p)],
                implementations=everywhere if p == 8192 else ("mosaic", "triton"),
                bar=("matmul", b),
                peers={"flashinfer prefix": f},
            ),
        )
    yield (
        "four classes B256 P2K-16K",
        lambda: prefix_case(
            "four classes B256 P2K-16K",
            LLAMA,
            [(64, 2048), (64, 4096), (64, 8192), (64, 16384)],
            bar=("matmul", 0.6),
        ),
    )
    yield (
        "few heads B256 P8192",
        lambda: prefix_case(
            "few heads B256 P8192",
            QWEN_RANK,
            [(256, 8192)],
            bar=("matmul", 0.55),
            peers={"flashinfer prefix": 49.0},
        ),
    )
    for n_rows, bar, peers in ((32, 25.0, {"flashinfer prefix": 34.0}), (8, 16.0, {})):
        yield (
            f"cascade prefix B{n_rows} P8192",
            lambda n=n_rows, b=bar, f=peers: prefix_case(
                f"cascade prefix B{n} P8192",
                LLAMA,
                [(n, 8192)],
                rotate=4,
                implementations=("mosaic", "triton"),
                bar=("us", b),
                peers=f,
            ),
        )
    yield (
        "suffix B256 S256",
        lambda: suffix_case(
            "suffix B256 S256",
            LLAMA,
            np.full(256, 256),
            implementations=("triton", "xla"),
            bar=("us", 80.0),
            peers={"flashinfer suffix": 95.0},
        ),
    )
    lengths = np.random.default_rng(1).integers(1, 512, 256)
    lengths = _with_sum(lengths, 256 * 256)
    for splits in (None, (2,) * LLAMA.n_kv_heads):
        name = "suffix B256 S1-511" + (", two splits" if splits else "")
        yield name, lambda n=name, s=splits: suffix_case(n, LLAMA, lengths, splits=s)
    for prefix, bar, peer in ((8192, 160.0, 977.0), (16384, 215.0, 1874.0)):
        yield (
            f"whole B256 P{prefix} S256",
            lambda p=prefix, b=bar, f=peer: whole_case(
                f"whole B256 P{p} S256",
                LLAMA,
                256,
                p,
                256,
                bar=("us", b),
                peers={"flashinfer paged": f},
            ),
        )
    yield "append B256", lambda: append_case("append B256", LLAMA, 256, 1 << 17)
    for model, shape in ARG_SPECS.items():
        yield (
            f"{model} dense B128 P4096",
            lambda m=model, s=shape: prefix_case(f"{m} dense B128 P4096", s, [(128, 4096)]),
        )
        yield (
            f"{model} suffix B128 S256",
            lambda m=model, s=shape: suffix_case(f"{m} suffix B128 S256", s, np.full(128, 256)),
        )
    yield "baseline uniform16 B256 P8192 S256", _uniform
    for shared in (True, False):
        yield f"baseline two layouts shared={shared}", lambda s=shared: _layout(s)


def _with_sum(lengths: np.ndarray, total: int) -> np.ndarray:
    """Lengths in 1 to 511, some of them moved by one, so that they add up to ``total``."""
    step = 1 if lengths.sum() < total else -1
    while lengths.sum() != total:
        free = np.flatnonzero((lengths + step >= 1) & (lengths + step <= 511))
        lengths[free[: abs(int(total - lengths.sum()))]] += step
    return lengths


def _uniform() -> Case:
    from experiments.kernel_baseline_cases import uniform_case

    return uniform_case(
        "baseline uniform16 B256 P8192 S256",
        LLAMA,
        256,
        8192,
        256,
        bar=("us", 977.0 * 1.15),
        peers={"flashinfer paged": 977.0},
    )


def _layout(shared: bool) -> Case:
    from experiments.kernel_baseline_cases import layout_case

    return layout_case(f"baseline two layouts shared={shared}", LLAMA, 256, 8192, shared=shared)


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
    case: Case, implementation: str, loop: TimedLoop | Exception, ceilings: Ceilings
) -> dict[str, Any]:
    """Times one implementation of a case; one that could not compile gives a row with its error."""
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
    if case.bar is not None:
        kind, value = case.bar
        limit = value if kind == "us" else case.flops / (value * ceilings.matmul) * 1e6
        row |= {"bar": f"{kind} {value:.4g}", "bar_us": limit, "met": us <= limit}
        row |= {"device_met": device_us is not None and device_us <= limit}
    return row


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
    tuned = tune(console.print) if TUNE.value else {}
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
        rows.append(measure(case, name, loop, ceilings))
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
