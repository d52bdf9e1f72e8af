"""What engines have in common: the line of requests before the rows of a batch, and a run by the clock.

An engine says how a request is checked and what one step does; what enters here are requests with
arrival times, what leaves are the events of their tokens and the metrics of the run.
"""

import abc
import dataclasses
import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from kvgrain_jax.engine.metrics import RunMetrics
from kvgrain_jax.engine.request import Request
from kvgrain_jax.errors import RequestError
from kvgrain_jax.sharding import broadcast


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """New tokens of one request.

    Attributes:
      id: the request.
      tokens: its new tokens, in order.
      finished: no more will follow.
      reason: ``"stop"`` or ``"length"`` where finished, else None.
    """

    id: str
    tokens: tuple[int, ...]
    finished: bool = False
    reason: str | None = None


@runtime_checkable
class HasRequest(Protocol):
    """A row of the batch."""

    request: Request


class Line[Waiting, Running: HasRequest]:
    """Requests that wait and rows of the batch that run; an id is in it once.

    Args:
      max_rows: requests that run at once.

    Attributes:
      waiting: what is not yet admitted.
      rows: what runs, by row of the batch; each has its ``request``.
    """

    def __init__(self, max_rows: int):
        self.waiting: deque[Waiting] = deque()
        self.rows: list[Running | None] = [None] * max_rows
        self._ids: set[str] = set()

    @property
    def running(self) -> list[Running]:
        """The running requests."""
        return [row for row in self.rows if row]

    def check_ids(self, ids: Iterable[str]) -> None:
        """Check that requests which are to be submitted have ids of their own.

        Raises:
          RequestError: an id is in use or given twice.
        """
        for name, count in Counter(ids).items():
            if count > 1:
                raise RequestError(f"Request {name}: {count} requests have this id.")
            if name in self._ids:
                raise RequestError(f"Request {name}: a request with this id is in the engine.")

    def find(self, request_id: str) -> int | None:
        """Row of a running request; None while it waits.

        Raises:
          RequestError: there is no such request.
        """
        if request_id not in self._ids:
            raise RequestError(f"There is no request {request_id!r} in the engine.")
        for index, row in enumerate(self.rows):
            if row and row.request.id == request_id:
                return index
        return None

    def _enter(self, request_id: str, entry: Waiting) -> None:
        self.check_ids([request_id])
        self._ids.add(request_id)
        self.waiting.append(entry)


class Serving[Scheduler: Line](abc.ABC):
    """An engine over a line of requests.

    Args:
      scheduler: the line.
      kv_bytes_per_token: for the metrics.

    Attributes:
      scheduler: as given.
      metrics: what was measured so far.
    """

    def __init__(self, scheduler: Scheduler, kv_bytes_per_token: int):
        self.scheduler = scheduler
        self._token_bytes = kv_bytes_per_token
        self._begin()

    @abc.abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a request; raises as ``check``."""

    @abc.abstractmethod
    def check(self, request: Request) -> None:
        """Check that a request can be served at all; RequestError where it cannot."""

    @abc.abstractmethod
    def programs(self) -> list[tuple[str, Callable[[], object]]]:
        """Name of each program and a call that compiles it by a run that changes nothing."""

    @abc.abstractmethod
    def _step(self) -> Iterable[TokenEvent]: ...

    def warmup(self, on_program: Callable[[str, int, int], None] | None = None) -> None:
        """Compile the programs of every bucket, so that no request waits for it.

        Args:
          on_program: called before each program is compiled, with its name, how many are done, and
            how many there are.
        """
        programs = self.programs()
        for done, (name, compile_program) in enumerate(programs):
            if on_program:
                on_program(name, done, len(programs))
            compile_program()

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._start

    def step(self) -> list[TokenEvent]:
        """Admit, compute one chunk of prompts, decode a few tokens of every active row."""
        return list(self._step())

    def run(
        self,
        requests: Iterable[Request],
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> RunMetrics:
        """Serve requests as they arrive, by the wall clock, until all are done.

        Meanwhile the garbage collector leaves alone what was there before (``gc.freeze``, and
        ``gc.unfreeze`` at the end): a pass over the objects of compiled programs would hold up a step
        for a tenth of a second or more.

        Args:
          requests: in any order; each is submitted ``arrival`` seconds after this call.
          on_event: called for every group of new tokens (streaming).

        Returns:
          The metrics of this run, also in ``self.metrics`` while it goes on.

        Raises:
          RequestError: a request can never be served, or an id is in use or given twice; no
            request was started.
        """
        pending = deque(sorted(requests, key=lambda request: request.arrival))
        for request in pending:
            self.check(request)
        self.scheduler.check_ids(request.id for request in pending)
        gc.freeze()
        self._begin()
        try:
            self._serve(pending, on_event)
        finally:
            gc.unfreeze()
        return self.metrics

    def _serve(
        self, pending: deque[Request], on_event: Callable[[TokenEvent], None] | None
    ) -> None:
        while pending or self.has_work:
            # Every process of a mesh must submit the same requests, so one clock decides.
            now = float(broadcast(np.float64(self.now)))
            while pending and pending[0].arrival <= now:
                self.submit(pending.popleft())
            if not self.has_work:
                time.sleep(max(0.0, pending[0].arrival - now))
                continue
            for event in self._step():
                if on_event:
                    on_event(event)

    def _begin(self) -> None:
        self.metrics = RunMetrics(kv_bytes_per_token=self._token_bytes)
        self._start = time.perf_counter()
