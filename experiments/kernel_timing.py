"""Timing of device code: enters a step, leaves microseconds; and the ceilings of the device.

A step maps its arrays to an output. One jitted loop runs it many times. Each run's input depends on
the output of the one before, through one element of it, which costs a kernel of about a microsecond
that is counted: without it the compiler would drop runs whose output nobody reads. Work of less than
some 40 µs is bound by the host, which launches a kernel every few microseconds; so the time that the
GPU spent inside the step's kernels is measured beside it.
"""

import concurrent.futures
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

UNROLL = 16  # runs in one iteration of the loop, which itself costs about 10 µs
LONG_CALL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class TimedLoop:
    """A compiled loop over a step, ready to be timed.

    Attributes:
      call: the loop.
      args: its arrays.
      runs: runs of the step in one call.
      turns: a program that runs the step once for each of ``n_turns`` inputs; None where runs work
        in place.
      n_turns: inputs that take turns.
    """

    call: Callable[..., Any]
    args: Sequence[Any]
    runs: int
    turns: jax.stages.Compiled | None
    n_turns: int

    def microseconds(self, repeats: int = 9) -> float:
        """Median over ``repeats`` calls of the time of one run; over three where calls are long."""
        begin = time.perf_counter()
        jax.block_until_ready(self.call(*self.args))
        if time.perf_counter() - begin > LONG_CALL_SECONDS:
            repeats = min(repeats, 3)
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(self.call(*self.args))
            times.append((time.perf_counter() - begin) / self.runs)
        return statistics.median(times) * 1e6

    def kernels(self, repeats: int = 7) -> list[tuple[str, float]] | None:
        """Names and microseconds of one run's kernels, from CUPTI: the run of median length.

        Where inputs take turns, all their runs are listed, each with its share of the time.
        """
        if self.turns is None:
            return None
        from jax.experimental.mosaic.gpu import profiler

        _, measured = profiler.measure(self.turns, aggregate=False, iterations=repeats)(*self.args)
        if not measured:
            return None
        lists = [
            [(name, milliseconds * 1e3 / self.n_turns) for name, milliseconds in run]
            for run in measured
        ]
        return sorted(lists, key=lambda run: sum(us for _, us in run))[repeats // 2]

    def device_microseconds(self) -> float | None:
        """Time inside the kernels of one run, without the gaps between them."""
        found = self.kernels()
        return None if found is None else sum(us for _, us in found)


def compile_loop(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    runs: int = 256,
    in_place: bool = False,
    n_turns: int = 1,
) -> TimedLoop:
    """Compile a loop that runs ``step(turn, *args)`` ``runs`` times.

    Args:
      step: gets a number below ``n_turns`` and ``args``.
      args: arrays on the device.
      runs: runs in one call, best a multiple of ``UNROLL``.
      in_place: a step's output is the first argument of the next one; otherwise all get the same.
      n_turns: inputs among which the step takes turns, a divisor of ``UNROLL`` and ``runs``.
    """

    # Jitted apart, the step is traced and lowered once for each of the turns, not for each run.
    step = jax.jit(step, static_argnums=0)
    unrolled = math.gcd(runs, UNROLL)

    @jax.jit
    def loop(first: Any, *others: Any) -> Any:
        def body(_: jax.Array, first: Any) -> Any:
            for turn in range(unrolled):
                out = step(turn % n_turns, first, *others)
                first = out if in_place else _after(first, out)
            return first

        return lax.fori_loop(0, runs // unrolled, body, first)

    def each_turn(*args: Any) -> list[Any]:
        return [step(turn, *args) for turn in range(n_turns)]

    turns = None if in_place else jax.jit(each_turn).lower(*args).compile()
    return TimedLoop(loop.lower(*args).compile(), args, runs, turns, n_turns)


def _after(first: jax.Array, out: Any) -> jax.Array:
    """``first``, unchanged but for its first element, which now depends on ``out``."""
    probe = jnp.ravel(jax.tree.leaves(out)[0])[0] * 1e-30
    return first.at[(0,) * first.ndim].add(probe.astype(first.dtype))


def compile_all(jobs: Sequence[Callable[[], TimedLoop]]) -> list[TimedLoop | Exception]:
    """Compile in parallel, before anything is timed; a job that fails gives its exception."""

    def attempt(job: Callable[[], TimedLoop]) -> TimedLoop | Exception:
        try:
            return job()
        except Exception as error:  # one kernel that cannot compile must not end the others' run
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        return list(pool.map(attempt, jobs))


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the device reaches in this run.

    Attributes:
      matmul: FLOP/s of an 8192³ bf16 product.
      copy: bytes/s of a copy of 2 GB, reads and writes counted.
      read: bytes/s of a sum over 2 GB.
    """

    matmul: float
    copy: float
    read: float

    def floor(self, flops: float, n_bytes: float) -> float:
        """Least microseconds for the work: the roofline."""
        return max(flops / self.matmul, n_bytes / max(self.copy, self.read)) * 1e6


def measure_ceilings(size: int = 8192, n_bytes: int = 1 << 31) -> Ceilings:
    """Measure the ceilings; smaller sizes serve slow devices."""
    a, b = normal(0, (size, size), jnp.bfloat16), normal(1, (size, size), jnp.bfloat16)
    b = b * jnp.bfloat16(size**-0.5)  # keeps the size of the product's values
    matmul = compile_loop(lambda _, a, b: jnp.dot(a, b), (a, b), runs=16, in_place=True)
    x = normal(2, (n_bytes // 4,), jnp.float32)
    duplicate = jax.jit(lambda x: x.copy())
    copies = [_seconds(lambda: [duplicate(x) for _ in range(4)]) / 4 for _ in range(7)]
    read = compile_loop(lambda _, x: jnp.sum(x), (x,), runs=8)
    copied = 2 * n_bytes / statistics.median(copies)
    return Ceilings(
        2 * size**3 / matmul.microseconds() * 1e6, copied, n_bytes / read.microseconds() * 1e6
    )


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def normal(seed: int, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Standard normal values on the device, never zeros: zeros can run faster than data."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)
