"""Merge of attention results over disjoint sets of keys, by log-sum-exp."""

from jaxtyping import Array, Float

from pallas_kernels.implementation import select
from pallas_kernels.merge import xla


def merge_partials(
    outs: Float[Array, "P B H D"], lses: Float[Array, "P B H"], *, implementation: str = "auto"
) -> tuple[Float[Array, "B H D"], Float[Array, "B H"]]:
    """Merge ``P`` partial results of every row and head into one.

    Args:
      outs: normalised outputs, float32; 0 where the partial is empty.
      lses: natural log-sum-exps, float32; ``-inf`` where the partial is empty.
      implementation: ``"auto"`` or ``"xla"``, which the compiler fuses into one kernel.

    Returns:
      ``(out, lse)`` in float32 over the union of the keys; ``(0, -inf)`` where all are empty.

    Raises:
      ImplementationError: no such implementation.

    Source: GraniKV Eq. 1.
    """
    candidates = {"xla": (xla.merge_partials, None)}
    return select("merge_partials", implementation, candidates)(outs, lses)
