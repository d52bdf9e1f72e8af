"""RMS norm of heads, RoPE and KV append with Pallas Triton: one program a row and KV head.

The queries are written folded, as the attention kernels read them: there the transposition back to
``[B, H, D]`` meets its inverse, and the compiler drops both.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks


def rope_append(k, v, qkv, cos, sin, slots, norms, *, eps, interpret=False):
    """See ``api.rope_append``."""
    n_rows, n_kv_heads, members, head_dim = qkv.shape
    group = members - 2
    k, v, folded = blocks.call(
        functools.partial(_kernel, group=group, eps=eps),
        out_shape=(
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct((n_kv_heads, n_rows * group, head_dim), qkv.dtype),
        ),
        grid=(n_kv_heads, n_rows),
        input_output_aliases={4: 0, 5: 1},
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(qkv, cos, sin, slots, k, v, *(norms or ()))
    q = folded.reshape(n_kv_heads, n_rows, group, head_dim).transpose(1, 0, 2, 3)
    return k, v, q.reshape(n_rows, -1, head_dim)


def _kernel(
    qkv_ref,  # [B, K, G + 2, D]
    cos_ref,  # [B, D / 2]
    sin_ref,  # [B, D / 2]
    slots_ref,  # [B]
    *refs,
    group,
    eps,
):
    gains = refs[2:-3]  # behind the pool that came in: none, or of queries and keys, [D] each
    k_ref, v_ref, q_ref = refs[-3:]  # [N, K, D] ×2, [K, B · G, D]
    head, row = pl.program_id(0), pl.program_id(1)
    n_slots, _, head_dim = k_ref.shape
    half = head_dim // 2
    column = jnp.arange(blocks.padded(half, least=1), dtype=jnp.int32)
    real = column < half
    cos = plt.load(cos_ref.at[row, column], mask=real, other=0.0)
    sin = plt.load(sin_ref.at[row, column], mask=real, other=0.0)
    slot = slots_ref[row]
    inside = real & (slot < n_slots)
    slot = jnp.minimum(slot, n_slots - 1)

    def halves(member):
        return [
            plt.load(qkv_ref.at[row, head, member, column + offset], mask=real, other=0.0)
            for offset in (0, half)
        ]

    def normed(parts, gain_ref):
        squares = sum(jnp.sum(x * x) for x in parts)
        scale = lax.rsqrt(squares / head_dim + eps)
        for x, offset in zip(parts, (0, half), strict=True):
            gain = plt.load(gain_ref.at[column + offset], mask=real, other=0.0)
            rounded = (x * scale * gain.astype(jnp.float32)).astype(q_ref.dtype)
            yield rounded.astype(jnp.float32)

    def turned(member):
        first, second = (x.astype(jnp.float32) for x in halves(member))
        if gains:
            first, second = normed((first, second), gains[member == group])
        # Rounded as the projections are before the pool's dtype is taken on, as in XLA.
        parts = first * cos - second * sin, second * cos + first * sin
        return [x.astype(q_ref.dtype) for x in parts]

    def put(ref, place, parts, mask):
        for x, offset in zip(parts, (0, half), strict=True):
            plt.store(ref.at[(*place, column + offset)], x.astype(ref.dtype), mask=mask)

    for member in range(group):
        put(q_ref, (head, row * group + member), turned(member), real)
    put(k_ref, (slot, head), turned(group), inside)
    put(v_ref, (slot, head), halves(group + 1), inside)
