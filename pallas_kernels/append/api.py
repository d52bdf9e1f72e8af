"""KV append: new keys and values go to their slots, in place when the pool is donated."""

from jaxtyping import Array, Float, Int

from pallas_kernels.append import xla
from pallas_kernels.implementation import device_reason, interpreting, select, trace_once


def append_kv(
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    new_k: Float[Array, "B K D"],
    new_v: Float[Array, "B K D"],
    slots: Int[Array, "B"],
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "N K D"], Float[Array, "N K D"]]:
    """Write row ``b`` of the new keys and values to slot ``slots[b]``.

    Args:
      k: keys of the whole pool.
      v: values of the whole pool.
      new_k: keys to write, in any float dtype; cast to the pool's.
      new_v: values to write.
      slots: target slots, int32, distinct. ``N`` or more drops the row (padding, inactive rows).
        Never pass a negative slot: it would count from the end.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later) or ``"xla"``.

    Returns:
      The pool's keys and values after the write.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.
    """
    args = (k, v, new_k, new_v, slots)

    def run_triton():
        from pallas_kernels.append import triton

        return trace_once(triton.append_kv, *args, interpret=interpreting())

    candidates = {
        "triton": (run_triton, device_reason("triton", least=(8, 0), below=(13, 0))),
        "xla": (lambda: xla.append_kv(*args), None),
    }
    return select("append_kv", implementation, candidates)()
