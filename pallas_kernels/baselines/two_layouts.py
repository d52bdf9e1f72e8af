"""Microbenchmark of two storage layouts (GraniKV, Table 5): one kernel, one tile shape, two tables.

Each program takes a tile of rows and the base of its keys. With the shared layout a tile holds the
rows of many requests and all bases are equal; with the unique layout a tile holds one request's
group of heads, padded, and each request has keys of its own. Enters arrays, leaves ``[B, H, D]``
float32. Needs jax-triton and a CUDA device; bf16 or f16.
"""

import jax
import jax.numpy as jnp
import jax_triton as jt  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    bases_ptr,
    out_ptr,
    scale: tl.constexpr,
    length: tl.constexpr,
    n_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    requests: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    head, index = tl.program_id(0), tl.program_id(1)
    folded, column = tl.arange(0, tile), tl.arange(0, head_dim)
    row = index * requests + folded // group
    kept = folded < requests * group
    heads = row * (n_kv_heads * group) + head * group + folded % group
    place = heads[:, None] * head_dim + column[None, :]
    q = tl.load(q_ptr + place, mask=kept[:, None], other=0.0)
    base = tl.load(bases_ptr + index).to(tl.int64)
    top = tl.full([tile], -float("inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    out = tl.zeros([tile, head_dim], tl.float32)
    for start in range(0, length, block):
        token = start + tl.arange(0, block)
        inside = token < length
        source = ((base + token) * n_kv_heads + head)[:, None] * head_dim + column[None, :]
        keys = tl.load(k_ptr + source, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(keys)) * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        values = tl.load(v_ptr + source, mask=inside[:, None], other=0.0)
        out = out * decay[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * decay + tl.sum(weights, 1)
        top = new_top
    tl.store(out_ptr + place, out / total[:, None], mask=kept[:, None])


def attend_layout(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    bases,  # [B / requests]
    *,
    length,
    requests,
    scale,
    tile=64,
    block=64,
    num_warps=4,
    num_stages=3,
):
    """Rows of tile ``t`` attend to the slots ``[bases[t], bases[t] + length)``.

    ``requests`` divides ``B``; ``requests · G`` is at most ``tile``; ``D`` is a power of two.
    """
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    return jt.triton_call(
        q,
        k,
        v,
        bases,
        kernel=_attend,
        out_shape=jax.ShapeDtypeStruct((n_rows, n_heads, head_dim), jnp.float32),
        grid=(n_kv_heads, n_rows // requests),
        num_warps=num_warps,
        num_stages=num_stages,
        scale=float(scale) * 1.4426950408889634,
        length=length,
        n_kv_heads=n_kv_heads,
        group=n_heads // n_kv_heads,
        head_dim=head_dim,
        requests=requests,
        tile=tile,
        block=block,
    )
