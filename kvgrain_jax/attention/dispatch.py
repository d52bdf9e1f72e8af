"""Dispatch: which backend the next decode step takes. Source: GraniKV §3.6, B.4.

A rule looks at what a batch shares and leaves, for every number of active rows, a choice. The choices
are made on the host when the plan is; the decode loop looks its own up in each step, by the rows that
are active then.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from kvgrain_jax.attention.costs import CostTable
from kvgrain_jax.attention.decode import BACKENDS
from kvgrain_jax.attention.segments import Segment
from kvgrain_jax.errors import ConfigError

# Threshold of the `meff` rule, by a part of the device's name. The A100's is the paper's (B.4b). The
# H200's was measured for prefixes of 8K tokens and more (results/h200/dispatch_fit); shorter ones
# cross later, where the backends differ by a microsecond or two. On a CPU the wide tiles of the XLA
# specification are the faster ones at every batch size.
M_SAT = {"A100": 1024, "H200": 128, "cpu": 1}
M_SAT_UNKNOWN = 1024
# Microseconds that a prefix pass adds to a layer besides its own time: its launch, and its partials in
# the merge. From whole steps (results/h200/decode_grid/regression), where without it cascade was taken
# for paged where the two lie within 4%.
PASS_US = 3.0


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """What a rule looks at.

    Attributes:
      n_rows: rows that decode when the plan is made.
      group: ``G``.
      segments: what they share.
      own_tokens: mean tokens of a row that no segment covers.
    """

    n_rows: int
    group: int
    segments: Sequence[Segment]
    own_tokens: float | int = 0

    @property
    def shared_tokens(self) -> int:
        """Tokens of all segments: what a step reads once."""
        return sum(segment.length for segment in self.segments)

    @property
    def covered_tokens(self) -> float:
        """Mean tokens of a row that segments cover."""
        return sum(s.length * s.n_rows for s in self.segments) / max(1, self.n_rows)

    @property
    def sharers(self) -> float:
        """Rows that read a shared token, in the mean over the tokens."""
        return self.covered_tokens * self.n_rows / max(1, self.shared_tokens)


@dataclasses.dataclass(frozen=True)
class DispatchRule:
    """Rule that chooses a backend.

    Attributes:
      backends: the backends it chooses from.
      m_sat: the ``meff`` rule: ``dense`` from this many effective rows ``rows * G`` on.
      costs: the ``calibrated`` rule: the backend that takes least time by what was measured on the
        device; the ``meff`` rule where None.
    """

    backends: tuple[str, ...]
    m_sat: int = M_SAT_UNKNOWN
    costs: CostTable | None = None

    def choose(self, occupancy: Occupancy, rows: np.ndarray) -> np.ndarray:
        """Of steps with so many of the rows still active, the backends, as indices in ``backends``."""
        if len(self.backends) == 1:
            return np.zeros(rows.shape, np.int32)
        if not occupancy.segments:
            return np.full(rows.shape, self.backends.index("paged"), np.int32)
        if self.costs is None:
            dense, cascade = (self.backends.index(name) for name in ("dense", "cascade"))
            wide = rows * occupancy.group >= self.m_sat
            return np.where(wide, dense, cascade).astype(np.int32)
        return np.argmin(self._times(self.costs, occupancy, rows), axis=0).astype(np.int32)

    def reason(self, occupancy: Occupancy, n_active: int) -> str:
        """Why a step takes the backend it takes, in a few words with the figures."""
        if len(self.backends) == 1:
            return "the only backend"
        if not occupancy.segments:
            return "no contiguous prefix"
        if self.costs is None:
            m_eff = n_active * occupancy.group
            return f"M_eff {m_eff} {'>=' if m_eff >= self.m_sat else '<'} {self.m_sat}"
        times = self._times(self.costs, occupancy, np.array([n_active]))
        figures = zip(self.backends, times[:, 0], strict=True)
        return "predicted a layer: " + ", ".join(f"{name} {time:.0f} us" for name, time in figures)

    def _times(self, costs: CostTable, occupancy: Occupancy, rows: np.ndarray) -> np.ndarray:
        """Microseconds of each backend, in the order of ``backends``."""
        sharers = np.maximum(1.0, occupancy.sharers * rows / max(1, occupancy.n_rows))
        own = costs.own(rows, occupancy.own_tokens)
        whole = occupancy.own_tokens + occupancy.covered_tokens
        times = {
            "dense": costs.dense(sharers, occupancy.shared_tokens) + PASS_US + own,
            "cascade": costs.cascade(sharers, occupancy.shared_tokens) + PASS_US + own,
            "paged": costs.own(rows, whole),
        }
        return np.stack([times[name] for name in self.backends])


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """Choices for one bucket of rows.

    Attributes:
      backends: what the loop is compiled for.
      table: ``[n_rows + 1]`` int32, the index in ``backends`` for each number of active rows.
    """

    backends: tuple[str, ...]
    table: np.ndarray


def make_choices(rule: DispatchRule, occupancy: Occupancy, *, n_rows: int) -> Choices:
    """Choices of a rule for every number of active rows.

    The loop is compiled for all backends of the rule, whether this batch can take them or not: one
    program serves whatever a bucket of rows meets, so that no request waits for a compilation.

    Args:
      rule: the rule.
      occupancy: the batch.
      n_rows: rows of the bucket.
    """
    return Choices(rule.backends, rule.choose(occupancy, np.arange(n_rows + 1)))


def fixed_choices(rule: DispatchRule, backend: str, *, n_rows: int) -> Choices:
    """One backend for every number of rows; the program of the rule serves where it has it."""
    backends = rule.backends if backend in rule.backends else (backend,)
    return Choices(backends, np.full(n_rows + 1, backends.index(backend), np.int32))


def make_rule(
    backend: str, m_sat: int | None = None, costs: CostTable | None = None
) -> DispatchRule:
    """The rule of a backend name.

    Args:
      backend: ``"auto"`` to dispatch over dense, cascade and paged, or one backend for every step.
      m_sat: threshold of the ``meff`` rule; the device's own where None.
      costs: measured times; with them ``"auto"`` is the ``calibrated`` rule, unless a threshold
        asks for the ``meff`` rule.

    Raises:
      ConfigError: unknown backend, or a threshold below 1.
    """
    calibrated = costs if m_sat is None else None
    if m_sat is None:
        m_sat = device_m_sat(jax.local_devices()[0].device_kind)
    if m_sat < 1:
        raise ConfigError(f"m_sat is {m_sat}; give a positive number of effective rows.")
    if backend == "auto":
        return DispatchRule(("dense", "cascade", "paged"), m_sat, calibrated)
    if backend not in BACKENDS:
        raise ConfigError(
            f"There is no backend {backend!r}; choose auto or one of {', '.join(BACKENDS)}."
        )
    return DispatchRule((backend,), m_sat)


def device_m_sat(device_kind: str) -> int:
    """Threshold of the ``meff`` rule for a device, by its name as JAX reports it."""
    for name, m_sat in M_SAT.items():
        if name.lower() in device_kind.lower():
            return m_sat
    return M_SAT_UNKNOWN
