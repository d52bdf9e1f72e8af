"""Per-step dispatch: which backend the next decode step takes. Source: GraniKV §3.6, B.4."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvgrain_jax.attention.decode import BACKENDS
from kvgrain_jax.errors import ConfigError

# Threshold of the `meff` rule, by a part of the device's name. The A100's is the paper's (B.4b). On a
# CPU the wide tiles of the XLA specification are the faster ones at every batch size.
M_SAT = {"A100": 1024, "cpu": 1}
M_SAT_UNKNOWN = 1024


@dataclasses.dataclass(frozen=True)
class DispatchRule:
    """Rule that chooses a backend from what a step sees.

    Attributes:
      backends: the backends it chooses from; an index of this tuple is the choice.
      m_sat: ``dense`` from this many effective rows on, with all three backends to choose from.
    """

    backends: tuple[str, ...]
    m_sat: int = M_SAT_UNKNOWN

    def choose(
        self, rows: Int[Array, ""], group: int, n_segments: Int[Array, ""]
    ) -> Int[Array, ""]:
        """Index of the backend for a step of ``rows`` active rows.

        ``paged`` where no row has a contiguous prefix; else ``dense`` if and only if
        ``M_eff = rows * G >= m_sat``, and ``cascade`` below.
        """
        if len(self.backends) == 1:
            return jnp.int32(0)
        shared = jnp.where(rows * group >= self.m_sat, 0, 1)
        return jnp.where(n_segments > 0, shared, 2).astype(jnp.int32)


def make_rule(backend: str, m_sat: int | None = None) -> DispatchRule:
    """The rule of a backend name.

    Args:
      backend: ``"auto"`` for the ``meff`` rule over dense, cascade and paged, or one backend for
        every step.
      m_sat: threshold of the ``meff`` rule; the device's own where None.

    Raises:
      ConfigError: unknown backend, or a threshold below 1.
    """
    if m_sat is None:
        m_sat = device_m_sat(jax.devices()[0].device_kind)
    if m_sat < 1:
        raise ConfigError(f"m_sat is {m_sat}; give a positive number of effective rows.")
    if backend == "auto":
        return DispatchRule(("dense", "cascade", "paged"), m_sat)
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
