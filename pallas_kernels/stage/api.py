"""Staging: keys and values that lie scattered are copied side by side, where kernels read them best."""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_reason, interpreting, select, trace_once
from pallas_kernels.stage import xla


def stage_kv(
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    new_k: Float[Array, "T K D"],
    new_v: Float[Array, "T K D"],
    slots: Int[Array, "S"],
    n: Int[Array, ""],
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "S K D"], Float[Array, "S K D"]]:
    """Copy tokens of the pool, and some that are not in it yet, side by side.

    Args:
      k: keys of the whole pool.
      v: values of the whole pool.
      new_k: keys beside it, in the pool's dtype.
      new_v: values beside it.
      slots: where each token of the copy comes from, int32: a slot of the pool, or ``N + t`` for
        token ``t`` beside it.
      n: how many of the ``slots`` count. Nobody may read the copy behind them: it holds anything.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later) or ``"xla"``.

    Returns:
      The copied keys and values.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.
    """
    args = (k, v, new_k, new_v, slots, n)

    def run_triton():
        from pallas_kernels.stage import triton

        return trace_once(triton.stage_kv, *args, interpret=interpreting())

    candidates = {
        "triton": (run_triton, device_reason("triton", least=(8, 0), below=(13, 0))),
        "xla": (lambda: xla.stage_kv(*args), None),
    }
    return select("stage_kv", implementation, candidates)()
