"""KV append with Pallas Triton: one program a row, both pools written in place."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks


def append_kv(k, v, new_k, new_v, slots, *, interpret=False):  # [N, K, D] ×2, [B, K, D] ×2, [B]
    """See ``api.append_kv``."""
    n_slots, n_kv_heads, head_dim = k.shape
    width = n_kv_heads * head_dim
    pools = (x.reshape(n_slots, width) for x in (k, v))
    rows = (x.reshape(-1, width) for x in (new_k, new_v))
    new = blocks.call(
        _kernel,
        out_shape=(jax.ShapeDtypeStruct((n_slots, width), k.dtype),) * 2,
        grid=(slots.shape[0],),
        input_output_aliases={3: 0, 4: 1},
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*rows, slots, *pools)
    return tuple(x.reshape(k.shape) for x in new)


def _kernel(
    new_k_ref,  # [B, K · D]
    new_v_ref,  # [B, K · D]
    slots_ref,  # [B]
    _k_ref,
    _v_ref,
    k_ref,  # [N, K · D]
    v_ref,  # [N, K · D]
):
    row = pl.program_id(0)
    n_slots, width = k_ref.shape
    slot = slots_ref[row]
    column = jnp.arange(blocks.padded(width), dtype=jnp.int32)
    real = column < width
    for new_ref, pool_ref in ((new_k_ref, k_ref), (new_v_ref, v_ref)):
        values = plt.load(new_ref.at[row, column], mask=real, other=0.0)
        plt.store(
            pool_ref.at[jnp.minimum(slot, n_slots - 1), column],
            values.astype(pool_ref.dtype),
            mask=real & (slot < n_slots),
        )
