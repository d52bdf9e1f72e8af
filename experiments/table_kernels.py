"""Times one kernel: enters a unit whose cell names a piece of work, leaves rates and bytes.

Fields of a cell: ``case``, one of ``CASES``; ``heads``, a name of ``kernel_cases.ARG_SPECS``; ``batch``
rows; ``prefix_tokens`` and ``suffix_tokens`` where the case has them; ``runs`` in one call;
``ceiling``, the sizes of the matmul and of the copy that set the roofline. The variant names the
implementation.

Metrics: ``us`` in the loop and ``device_us`` inside the kernels (CUPTI); ``gb_s`` and ``tflops`` over the
time in the loop; ``flop_per_byte`` and ``gigabytes`` from the fewest bytes that must move; the device's
``ceiling_tflops`` and ``ceiling_gb_s`` in this run; ``of_roofline_percent``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments import kernel_cases, kernel_timing
from experiments.kernel_cases import Case, HeadShape
from experiments.table_spec import Unit
from kvgrain_jax.errors import ConfigError

CASES = ("shared", "unique", "prefix", "suffix", "whole", "uniform16")


def measure(
    unit: Unit, load: Callable[..., Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Times the kernel; ``load`` is not used: a kernel needs no model.

    Raises:
      ConfigError: unknown case, or an implementation that it does not have here.
    """
    cell, name = unit.cell, unit.variant
    progress("measuring the ceilings")
    ceilings = _ceilings(*cell["ceiling"])
    progress("compiling")
    case = make_case(cell["case"], name, cell)
    if name not in case.steps:
        raise ConfigError(
            f"{cell['case']} has no implementation {name!r}: {', '.join(case.steps)}."
        )
    loop = kernel_timing.compile_loop(
        case.steps[name], case.args, runs=cell["runs"], n_turns=case.n_turns
    )
    if jax.default_backend() != "gpu":
        loop = dataclasses.replace(loop, turns=None)  # CUPTI times kernels of GPUs only
    progress("timing")
    us = loop.microseconds(repeats=7)
    bandwidth = max(ceilings.copy, ceilings.read)
    return {
        "metrics": {
            "us": us,
            "device_us": loop.device_microseconds(),
            "gb_s": case.n_bytes / us / 1e3,
            "tflops": case.flops / us / 1e6,
            "flop_per_byte": case.flops / case.n_bytes,
            "gigabytes": case.n_bytes / 1e9,
            "of_roofline_percent": 100 * ceilings.floor(case.flops, case.n_bytes) / us,
            "ceiling_tflops": ceilings.matmul / 1e12,
            "ceiling_gb_s": bandwidth / 1e9,
        }
    }


def make_case(case: str, implementation: str, cell: Any) -> Case:
    """The work of a cell.

    ``shared`` and ``unique`` are one kernel over two layouts: one prefix that all rows read, or as many
    copies of it as there are rows.

    Raises:
      ConfigError: there is no such case, or a package that it needs is missing.
    """
    shape: HeadShape = kernel_cases.ARG_SPECS[cell["heads"]]
    rows, prefix = cell["batch"], cell.get("prefix_tokens", 0)
    chosen = (implementation,)
    if case in ("shared", "unique"):
        if implementation == "jax-triton":
            return _baseline("layout_case", case, shape, rows, prefix, shared=case == "shared")
        classes = [(rows, prefix)] if case == "shared" else [(1, prefix)] * rows
        return kernel_cases.prefix_case(case, shape, classes, implementations=chosen)
    if case == "prefix":
        return kernel_cases.prefix_case(case, shape, [(rows, prefix)], implementations=chosen)
    if case == "suffix":
        lengths = np.full(rows, cell["suffix_tokens"])
        return kernel_cases.suffix_case(case, shape, lengths, implementations=chosen)
    if case == "whole":
        return kernel_cases.whole_case(case, shape, rows, prefix, cell["suffix_tokens"])
    if case == "uniform16":
        return _baseline("uniform_case", case, shape, rows, prefix, cell["suffix_tokens"])
    raise ConfigError(f"There is no kernel case {case!r}; choose one of {', '.join(CASES)}.")


def _baseline(maker: str, *args: Any, **fields: Any) -> Case:
    try:
        from experiments import kernel_baseline_cases
    except ImportError as error:
        raise ConfigError(
            f"The baseline kernels need jax-triton, which cannot be imported: {error}. Install "
            "kvgrain-jax[cuda13]."
        ) from error
    return getattr(kernel_baseline_cases, maker)(*args, **fields)


@functools.cache
def _ceilings(size: int, n_bytes: int) -> kernel_timing.Ceilings:
    return kernel_timing.measure_ceilings(size, n_bytes)
