"""RMS norm of heads, RoPE and KV append in one: projections in, queries out, keys and values to their slots."""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_reason, interpreting, select, trace_once
from pallas_kernels.rope_append import xla


def rope_append(
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    qkv: Float[Array, "B K G_and_2 D"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    slots: Int[Array, "B"],
    norms: tuple[Float[Array, "D"], Float[Array, "D"]] | None = None,
    *,
    eps: float = 0.0,
    implementation: str = "auto",
) -> tuple[Float[Array, "N K D"], Float[Array, "N K D"], Float[Array, "B H D"]]:
    """Rotate the queries and the key of each KV head; write key and value to the row's slot.

    Args:
      k: keys of the whole pool.
      v: values of the whole pool.
      qkv: for each row and KV head its ``G`` queries, its key, its value, before position encoding.
      cos: cosines of the row's angles, float32, ``half = D / 2``.
      sin: sines of them.
      slots: target slots, int32, distinct. ``N`` or more drops the row. Never pass a negative slot.
      norms: gains of the RMS norms that queries and keys pass first, as in Qwen3; None for none.
      eps: of the norms.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later) or ``"xla"``.

    Returns:
      ``(k, v, q)``: the pool after the write, in place where it is donated, and the queries in the
      dtype of ``qkv``. Each pair ``(x[i], x[i + D/2])`` is turned by its angle, in float32; what is
      normed is rounded to the dtype of ``qkv`` before.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.

    Source: RoFormer (arXiv:2104.09864), the half-rotation form.
    """
    args = (k, v, qkv, cos, sin, slots, norms)

    def run_triton():
        from pallas_kernels.rope_append import triton

        return trace_once(triton.rope_append, *args, eps=eps, interpret=interpreting())

    candidates = {
        "triton": (run_triton, device_reason("triton", least=(8, 0), below=(13, 0))),
        "xla": (lambda: xla.rope_append(*args, eps=eps), None),
    }
    return select("rope_append", implementation, candidates)()
