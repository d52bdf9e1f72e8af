"""What a run measured: per request, per decode call, and in all."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """One finished request. Times are seconds after the start of the run.

    Attributes:
      id: name of the request.
      arrival: when the request came to exist.
      first_token: when its first token was on the host.
      finish: when its last token was on the host.
      prompt_tokens: length of the prompt.
      cached_tokens: prompt tokens that were found in the prefix index and not computed again.
      tokens: the generated tokens, the stop token included.
      reason: ``"stop"`` or ``"length"``.
    """

    id: str
    arrival: float
    first_token: float
    finish: float
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    reason: str

    @property
    def ttft(self) -> float:
        """Time to first token, seconds from arrival; waiting for admission is part of it."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Time per output token after the first, seconds; NaN for a single token."""
        if len(self.tokens) < 2:
            return float("nan")
        return (self.finish - self.first_token) / (len(self.tokens) - 1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """State of the engine after one decode call.

    Attributes:
      time: seconds after the start of the run.
      running: rows of the batch in use.
      waiting: requests that have arrived and are not yet admitted.
      hot_tokens: HOT slots that hold a live slab.
      cold_tokens: COLD slots (lent ones included) in use.
      lent_tokens: HOT slots lent to COLD.
      prefix_tokens: tokens of shared prefixes in the index, each counted once however many
        requests use it.
    """

    time: float
    running: int
    waiting: int
    hot_tokens: int
    cold_tokens: int
    lent_tokens: int
    prefix_tokens: int


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """Which backend one decode step took, and why.

    Attributes:
      backend: name of the backend.
      rows: rows that were decoded.
      m_eff: ``rows * G``, what the ``meff`` rule looks at.
      reason: why the dispatch took this backend, with the figures that decided.
      prefix_tokens_read: tokens of shared prefixes whose keys and values the step read: once for
        each segment with ``dense`` and ``cascade``, once for each row with ``paged``.
    """

    backend: str
    rows: int
    m_eff: int
    reason: str
    prefix_tokens_read: int


@dataclasses.dataclass
class RunMetrics:
    """Everything a run measured.

    Attributes:
      kv_bytes_per_token: bytes of keys and values of one token over all layers.
      requests: finished requests, in order of finishing.
      samples: one per decode call.
      steps: one per decode step.
    """

    kv_bytes_per_token: int
    requests: list[RequestMetrics] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    steps: list[StepTrace] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Figures of the run: times in seconds, rates per second, sizes in tokens or bytes."""
        output_tokens = sum(len(r.tokens) for r in self.requests)
        end = max((r.finish for r in self.requests), default=0.0)
        start = min((r.arrival for r in self.requests), default=0.0)
        backends = Counter(step.backend for step in self.steps)
        prefix_tokens = max((s.prefix_tokens for s in self.samples), default=0)
        return {
            "requests": len(self.requests),
            "prompt_tokens": sum(r.prompt_tokens for r in self.requests),
            "cached_tokens": sum(r.cached_tokens for r in self.requests),
            "output_tokens": output_tokens,
            "duration_s": end - start,
            "output_tokens_per_s": output_tokens / (end - start) if end > start else 0.0,
            "ttft_p50_s": percentile([r.ttft for r in self.requests], 50),
            "ttft_p99_s": percentile([r.ttft for r in self.requests], 99),
            "tpot_p50_s": percentile([r.tpot for r in self.requests], 50),
            "tpot_p99_s": percentile([r.tpot for r in self.requests], 99),
            "decode_steps": len(self.steps),
            "backend_fractions": {
                name: count / len(self.steps) for name, count in sorted(backends.items())
            },
            "peak_hot_tokens": max((s.hot_tokens for s in self.samples), default=0),
            "peak_cold_tokens": max((s.cold_tokens for s in self.samples), default=0),
            "peak_running": max((s.running for s in self.samples), default=0),
            "prefix_bytes_stored": prefix_tokens * self.kv_bytes_per_token,
            "prefix_bytes_read_per_step": self.kv_bytes_per_token
            * (float(np.mean([s.prefix_tokens_read for s in self.steps])) if self.steps else 0.0),
        }


def percentile(values: Sequence[float], q: int) -> float:
    """The ``q``-th percentile of the values that are numbers; NaN if there is none."""
    finite = [value for value in values if not np.isnan(value)]
    return float(np.percentile(finite, q)) if finite else float("nan")
