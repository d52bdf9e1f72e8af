"""Search for the kernels' knobs on this device: enters nothing, leaves ``tuning/DEVICE.json``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.kernel_cases import ARG_SPECS, HeadShape, prefix_case, suffix_case
from experiments.kernel_timing import TimedLoop, compile_all, compile_loop
from pallas_kernels import tuning
from pallas_kernels.segment_attention.limits import SHARED_MEMORY_BYTES
from pallas_kernels.split_kv_decode.splits import even_splits
from pallas_kernels.triton_blocks import padded

TILES = ((64, 64), (64, 128), (128, 128))
KNOBS = [
    {"block": block, "num_warps": warps, "num_stages": stages}
    for block, warps, stages in (
        (16, 1, 2),
        (16, 1, 3),
        (16, 2, 3),
        (32, 1, 2),
        (32, 2, 2),
        (32, 2, 3),
        (64, 2, 3),
        (64, 4, 2),
        (64, 4, 3),
        (128, 4, 2),
        (128, 8, 3),
    )
]


OPS = ("segment_attention", "split_kv_decode")


def tune(say: Callable[[str], Any], ops: Sequence[str] = OPS) -> dict[str, list[dict[str, Any]]]:
    """Time every knob on the head shapes of ``ARG_SPECS``, keep the fastest, write the files.

    The time is that inside the kernels, where the device tells it.

    Args:
      say: called with a line for each shape.
      ops: operations to tune.

    Returns:
      The entries written, by operation.
    """
    shapes = list(dict.fromkeys(ARG_SPECS.values()))
    sizes = ((256, 8192), (256, 2048), (64, 8192), (32, 8192), (8, 8192))
    prefix = [_prefix(shape, n_rows, length) for shape in shapes for n_rows, length in sizes]
    heads = {(shape.head_dim, shape.group): shape for shape in reversed(shapes)}.values()
    suffix = [_suffix(shape, n_rows) for shape in heads for n_rows in (256, 128, 64, 16)]
    written = {}
    for op, searches in zip(OPS, (prefix, suffix), strict=True):
        if op not in ops:
            continue
        loops = iter(compile_all([job for _, jobs in searches for _, job in jobs]))
        written[op] = []
        for shape, jobs in searches:
            times = []
            for knobs, _ in jobs:
                loop = next(loops)
                if isinstance(loop, Exception):
                    say(f"{op} {shape} {knobs}: {loop}")
                else:
                    times.append((loop.device_microseconds() or loop.microseconds(), knobs))
            say(f"{op} {shape}: " + ", ".join(f"{_brief(k)} {us:.1f} µs" for us, k in times))
            written[op].append({"shape": shape, "knobs": min(times, key=lambda t: t[0])[1]})
        say(f"Wrote {tuning.write(op, written[op])}.")
    return written


type _Search = tuple[dict[str, int], list[tuple[dict[str, int], Callable[[], TimedLoop]]]]


def _prefix(shape: HeadShape, n_rows: int, length: int) -> _Search:
    jobs = []
    for row_tile, kv_tile in TILES:
        needed = (row_tile + 4 * kv_tile) * shape.head_dim * 2
        if needed > SHARED_MEMORY_BYTES or (row_tile > 64 and n_rows * shape.group <= 64):
            continue
        case = prefix_case("", shape, [(n_rows, length)], rotate=4, tiles=(row_tile, kv_tile))
        job = functools.partial(compile_loop, case.steps["mosaic"], case.args, n_turns=4)
        jobs.append(({"row_tile": row_tile, "kv_tile": kv_tile}, job))
    sizes = {
        "folded_rows": n_rows * shape.group,
        "length": length,
        "n_kv_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
    }
    return sizes, jobs


def _suffix(shape: HeadShape, n_rows: int) -> _Search:
    jobs = []
    for knobs in KNOBS:
        case = suffix_case("", shape, np.full(n_rows, 256), knobs=knobs)
        jobs.append((knobs, functools.partial(compile_loop, case.steps["triton"], case.args)))
    n_programs = n_rows * shape.n_kv_heads
    n_programs *= even_splits(n_programs, 256)
    sizes = {"head_dim": padded(shape.head_dim), "group": shape.group, "programs": n_programs}
    return sizes, jobs


def _brief(knobs: dict[str, int]) -> str:
    return "/".join(map(str, knobs.values()))
