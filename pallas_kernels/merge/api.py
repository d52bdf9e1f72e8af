"""Merge of attention results over disjoint sets of keys, by log-sum-exp."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.implementation import device_reason, interpreting, select, trace_once
from pallas_kernels.merge import xla
from pallas_kernels.row_partials import RowPartials


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


def merge_row_partials(
    parts: Sequence[RowPartials],
    *,
    n_heads: int,
    out_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> tuple[Float[Array, "B H D"], Float[Array, "B H"]]:
    """Merge the partial results that each row and KV head has, of one or several sources.

    Args:
      parts: partials over disjoint keys, for the same rows and KV heads; at least one.
      n_heads: query heads, ``H``.
      out_dtype: of the output.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later) or ``"xla"``.

    Returns:
      ``(out, lse)``, the second in float32; ``(0, -inf)`` where a row has no partials.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.

    Source: GraniKV Eq. 1.
    """
    options = {"n_heads": n_heads, "out_dtype": out_dtype}

    def run_triton():
        from pallas_kernels.merge import triton

        return trace_once(triton.merge_row_partials, parts, interpret=interpreting(), **options)

    candidates = {
        "triton": (run_triton, device_reason("triton", least=(8, 0), below=(13, 0))),
        "xla": (lambda: xla.merge_row_partials(parts, **options), None),
    }
    return select("merge_row_partials", implementation, candidates)()
