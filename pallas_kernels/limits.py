"""What the Triton kernels can run: enters arguments, leaves a reason or None."""

import jax.numpy as jnp


def head_refusal(q, k) -> str | None:
    """Why no Triton kernel can attend with ``q`` to ``k``, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or q.dtype != k.dtype:
        return (
            "it runs bfloat16, float16 or float32, the same for q and k, not "
            f"{q.dtype} and {k.dtype}"
        )
    if q.shape[-1] > 256:
        return f"it needs a head dim of at most 256, not {q.shape[-1]}"
    return None
