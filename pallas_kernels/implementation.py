"""Choice of the implementation of an operation: enters what could run, leaves what runs.

The choice is made when a call is traced: under ``jit`` it is made once a compilation.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

ENVIRONMENT_VARIABLE = "KVGRAIN_IMPLEMENTATION"

type Candidate = tuple[Callable[..., Any], str | None]

_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)
_override: ContextVar[str | None] = ContextVar("override", default=None)
_records: ContextVar[tuple[list[tuple[str, str]], ...]] = ContextVar("records", default=())


class ImplementationError(ValueError):
    """The implementation asked for does not exist or cannot run on these arguments."""


def select(op: str, implementation: str, candidates: Mapping[str, Candidate]) -> Callable[..., Any]:
    """Return the callable of ``op`` that ``implementation`` names.

    Args:
      op: name of the operation, for messages and records.
      implementation: ``"auto"`` or a key of ``candidates``. ``"auto"`` follows ``override``, then
        the environment variable ``KVGRAIN_IMPLEMENTATION``, where the one named can run, and
        otherwise takes the first candidate that can run.
      candidates: best first, each with the reason why it cannot run on these arguments, or None.

    Raises:
      ImplementationError: the name is not one of the candidates, or that one cannot run.
    """
    preferred = _override.get() or os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    for name in (implementation, preferred):
        if name != "auto" and name not in candidates:
            raise ImplementationError(
                f"{op} has no implementation {name!r}; choose auto or one of "
                f"{', '.join(candidates)}."
            )
    if implementation == "auto":
        able = [name for name, (_, reason) in candidates.items() if reason is None]
        if not able:
            reasons = "; ".join(f"{name}: {reason}" for name, (_, reason) in candidates.items())
            raise ImplementationError(f"No implementation of {op} can run here. {reasons}.")
        implementation = preferred if preferred in able else able[0]
    run, reason = candidates[implementation]
    if reason is not None:
        raise ImplementationError(f"{op} cannot run as {implementation}: {reason}.")
    for record in _records.get():
        record.append((op, implementation))
    return run


@contextlib.contextmanager
def override(implementation: str) -> Iterator[None]:
    """Prefer ``implementation`` in every ``"auto"`` call traced inside, where it can run."""
    token = _override.set(implementation)
    try:
        yield
    finally:
        _override.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str]]]:
    """Collect ``(operation, implementation)`` of every call traced inside."""
    record: list[tuple[str, str]] = []
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run the Pallas kernels traced inside in Pallas's interpreter, on any device."""
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def interpreting() -> bool:
    """Whether a kernel that is being traced runs in the interpreter."""
    return _interpreting.get()


def trace_once(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``kernel`` so that a program which calls it in every layer traces and lowers it once.

    Args:
      kernel: a function of the module that holds a kernel.
      *args: arrays, or pytrees of them.
      **options: those without an array in them are static.
    """
    static = tuple(
        name
        for name, value in options.items()
        if not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))
    )
    return jax.jit(kernel, static_argnames=static)(*args, **options)


def runs_kernels() -> bool:
    """Whether ``"auto"`` takes GPU kernels in this process, where the arguments allow it."""
    preferred = _override.get() or os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    on_gpu = device_reason("a kernel", least=(8, 0), below=(13, 0)) is None
    return preferred != "xla" and on_gpu


def device_reason(name: str, *, least: tuple[int, int], below: tuple[int, int]) -> str | None:
    """Why this process's device cannot run the GPU implementation ``name``, or None.

    Args:
      name: of the implementation, for the message.
      least: compute capability, the first that can.
      below: compute capability, the first that cannot any more.
    """
    if interpreting():
        return None
    device = jax.local_devices()[0]
    needs = f"{name} needs an NVIDIA GPU of compute capability {least[0]}.{least[1]}"
    if device.platform != "gpu":
        return f"{needs}, and this process runs on {device.platform}"
    major, minor = (int(part) for part in str(device.compute_capability).split("."))
    if not least <= (major, minor) < below:
        return f"{needs} (below {below[0]}.{below[1]}), and this one has {major}.{minor}"
    return None
