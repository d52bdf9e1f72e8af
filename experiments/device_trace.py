"""What a device does while a function runs: enters the function, leaves its time by kind of work.

The events of a GPU are its kernels; those of a CPU are XLA's operations, among which attention cannot be
told from other work.
"""

import dataclasses
import pathlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable

import jax

from kvgrain_jax.errors import ConfigError

WAITS = 24
LAUNCH_GAP = 5e3  # nanoseconds
KINDS = ("attention", "matmul", "other", "collectives")

# By parts of the name, first match counts: our kernels are named after their operations, cuBLAS's
# and XLA's matmuls after what they are, XLA's own all-reduce after the `psum` that it computes.
_NAMES = {
    "collectives": (
        "nccl",
        "psum",
        "all-reduce",
        "allreduce",
        "all-gather",
        "all-to-all",
        "collective",
    ),
    "attention": ("attention", "split_kv", "merge_triton", "head_group", "uniform_paged", "body_"),
    "matmul": ("gemm", "cutlass", "nvjet", "cublas", "dot", "matmul", "convolution", "xmma"),
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One stretch of work of one device.

    Attributes:
      device: which.
      name: kernel or operation.
      begin, end: nanoseconds.
    """

    device: int
    name: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Shares:
    """Time of one device by kind, milliseconds, in the mean over the devices.

    Attributes:
      kinds: of each of ``KINDS``.
      idle: between the first event and the last, when nothing ran.
      launch: the part of ``idle`` in gaps of less than ``LAUNCH_GAP``: from one kernel to the next
        in line.
      names: of each kernel, longest first.
      count: events of one device.
      waits: the longest gaps of any device, as ``(before, after, milliseconds)``.
      waits_between: gaps of ``LAUNCH_GAP`` or more by the events around them, as ``(before, after):
        (times, milliseconds)``, longest first.
    """

    kinds: dict[str, float]
    idle: float
    launch: float
    names: dict[str, float]
    count: float
    waits: list[tuple[str, str, float]]
    waits_between: dict[tuple[str, str], tuple[float, float]]

    @property
    def total(self) -> float:
        """From the first event to the last."""
        return sum(self.kinds.values()) + self.idle


def kind_of(name: str) -> str:
    """Kind of a kernel or operation by its name."""
    lower = name.lower()
    for kind, parts in _NAMES.items():
        if any(part in lower for part in parts):
            return kind
    return "other"


def add_up(events: Iterable[Event]) -> Shares:
    """Times of the kinds; where events of a device overlap, the later begun counts from the end of the other."""
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    names: defaultdict[str, float] = defaultdict(float)
    devices: set[int] = set()
    reached: dict[int, float] = {}
    gaps: list[tuple[str, str, float]] = []
    before = ""
    for event in sorted(events, key=lambda event: (event.device, event.begin, event.end)):
        devices.add(event.device)
        begin = max(event.begin, reached.get(event.device, event.begin))
        gaps.append((before, event.name, begin - reached.get(event.device, begin)))
        before = event.name
        if event.end > begin:
            kinds[kind_of(event.name)] += event.end - begin
            names[event.name] += event.end - begin
            reached[event.device] = event.end
    n_devices = max(1, len(devices))
    scale = 1e-6 / n_devices
    between: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for before, after, ns in gaps:
        if ns >= LAUNCH_GAP:
            between[before, after].append(ns)
    return Shares(
        kinds={kind: ns * scale for kind, ns in kinds.items()},
        idle=sum(ns for *_, ns in gaps) * scale,
        launch=sum(ns for *_, ns in gaps if ns < LAUNCH_GAP) * scale,
        names={name: ns * scale for name, ns in sorted(names.items(), key=lambda item: -item[1])},
        count=len(gaps) / n_devices,
        waits=[
            (before, after, ns * 1e-6)
            for before, after, ns in sorted(gaps, key=lambda gap: -gap[2])[:WAITS]
            if ns > 0
        ],
        waits_between={
            pair: (len(waits) / n_devices, sum(waits) * scale)
            for pair, waits in sorted(between.items(), key=lambda item: -sum(item[1]))
        },
    )


def record(call: Callable[[], object]) -> list[Event]:
    """Events of the devices while ``call`` runs; it must wait for its work.

    Raises:
      ConfigError: the profiler saw no device event.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        path = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(path))
        events = [*_gpu_events(data)] or [*_cpu_events(data)]
    if not events:
        raise ConfigError("The profiler recorded no event of a device.")
    return events


def _gpu_events(data) -> Iterable[Event]:
    devices = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    for device, plane in enumerate(devices):
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    begin = event.start_ns
                    yield Event(device, event.name, begin, begin + event.duration_ns)


def _cpu_events(data) -> Iterable[Event]:
    for plane in data.planes:
        if plane.name == "/host:CPU":
            for line in plane.lines:
                if line.name.startswith("tf_XLA"):
                    for event in line.events:
                        if any(stat[0] == "hlo_op" for stat in event.stats):
                            begin = event.start_ns
                            yield Event(0, event.name, begin, begin + event.duration_ns)


def inside_loop(events: Iterable[Event]) -> list[Event]:
    """The events from the first attention or matmul of each device to its last.

    What lies outside belongs to the call of the loop, not to its steps.
    """
    events = list(events)
    ends: dict[int, tuple[float, float]] = {}
    for event in events:
        if kind_of(event.name) in ("attention", "matmul"):
            first, last = ends.get(event.device, (event.begin, event.end))
            ends[event.device] = min(first, event.begin), max(last, event.end)
    if not ends:
        return events
    return [
        event
        for event in events
        if ends[event.device][0] <= event.begin and event.end <= ends[event.device][1]
    ]
