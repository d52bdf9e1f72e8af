"""Residual sum and RMS norm in one: what a transformer does between two of its branches."""

from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import xla
from pallas_kernels.implementation import device_reason, interpreting, select, trace_once

WIDEST = 16384


def add_rms_norm(
    x: Float[Array, "T size"],
    delta: Float[Array, "T size"],
    weight: Float[Array, "size"],
    *,
    eps: float,
    implementation: str = "auto",
) -> tuple[Float[Array, "T size"], Float[Array, "T size"]]:
    """Add a branch to the residual stream, and normalise the sum for the next one.

    Args:
      x: residual stream.
      delta: what the branch adds, in the same dtype.
      weight: of the norm.
      eps: added to the mean square.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later, ``size`` up to 16,384) or ``"xla"``.

    Returns:
      ``(y, norm)`` in the dtype of ``x``: ``y = x + delta``, rounded, and
      ``y / sqrt(mean(y²) + eps) · weight``, computed in float32.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.

    Source: Root Mean Square Layer Normalization (arXiv:1910.07467).
    """

    def run_triton():
        from pallas_kernels.add_rms_norm import triton

        return trace_once(triton.add_rms_norm, x, delta, weight, eps=eps, interpret=interpreting())

    refused = None
    if x.shape[1] > WIDEST:
        refused = f"it holds a row of at most {WIDEST} features, not {x.shape[1]}"
    refused = refused or device_reason("triton", least=(8, 0), below=(13, 0))
    candidates = {
        "triton": (run_triton, refused),
        "xla": (lambda: xla.add_rms_norm(x, delta, weight, eps=eps), None),
    }
    return select("add_rms_norm", implementation, candidates)()
