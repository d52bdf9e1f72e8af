"""Uniform paged decode ("SGLang default"): every row reads its whole context through 16-token pages.

A plain Triton kernel of the usual design: one program takes a row, a KV head and a share of the
row's tokens; the heads of a group sit in one tile of 16 rows; partial results are merged after.
Enters arrays, leaves ``[B, H, D]`` float32. Needs jax-triton and a CUDA device; bf16 or f16.
"""

import jax
import jax.numpy as jnp
import jax_triton as jt  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

ROWS = 16  # least tile of a tensor-core product; a group of heads is padded to it


@triton.jit
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    pages_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    scale: tl.constexpr,
    n_pages: tl.constexpr,
    n_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    n_splits: tl.constexpr,
    rows: tl.constexpr,
):
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    member, column = tl.arange(0, rows), tl.arange(0, head_dim)
    n_heads: tl.constexpr = n_kv_heads * group
    first_head = row * n_heads + head * group
    kept = member < group
    q = tl.load(
        q_ptr + (first_head + member)[:, None] * head_dim + column[None, :],
        mask=kept[:, None],
        other=0.0,
    )
    length = tl.load(lengths_ptr + row)
    share = tl.cdiv(tl.cdiv(length, block), n_splits) * block
    begin = split * share
    end = tl.minimum(begin + share, length)
    top = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    out = tl.zeros([rows, head_dim], tl.float32)
    for start in range(begin, end, block):
        token = start + tl.arange(0, block)
        inside = token < end
        page = tl.load(pages_ptr + row * n_pages + token // page_size, mask=inside, other=0)
        slot = page.to(tl.int64) * page_size + token % page_size
        place = (slot * n_kv_heads + head)[:, None] * head_dim + column[None, :]
        keys = tl.load(k_ptr + place, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(keys)) * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        values = tl.load(v_ptr + place, mask=inside[:, None], other=0.0)
        out = out * decay[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * decay + tl.sum(weights, 1)
        top = new_top
    divisor = tl.where(total == 0.0, 1.0, total)
    place = split * tl.num_programs(1) * n_heads + first_head + member
    tl.store(
        out_ptr + place[:, None] * head_dim + column[None, :],
        out / divisor[:, None],
        mask=kept[:, None],
    )
    tl.store(lse_ptr + place, top + tl.log2(total), mask=kept)


def uniform_paged_decode(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    pages,  # [B, T]
    lengths,  # [B]
    *,
    scale,
    page_size=16,
    block=32,
    n_splits=1,
    num_warps=1,
    num_stages=4,
):
    """Attention of each row to the ``lengths[b]`` tokens of its pages.

    The defaults are the fastest of 28 settings on an H200, 256 rows of 8,448 tokens.

    ``D`` is a power of two of at least 16, the group at most 16, and a row has at least one token.
    """
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    outs, lses = jt.triton_call(
        q,
        k,
        v,
        pages,
        lengths,
        kernel=_decode,
        out_shape=(
            jax.ShapeDtypeStruct((n_splits, n_rows, n_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n_splits, n_rows, n_heads), jnp.float32),
        ),
        grid=(n_kv_heads, n_rows, n_splits),
        num_warps=num_warps,
        num_stages=num_stages,
        scale=float(scale) * 1.4426950408889634,
        n_pages=pages.shape[1],
        n_kv_heads=n_kv_heads,
        group=n_heads // n_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block=block,
        n_splits=n_splits,
        rows=ROWS,
    )
    weights = jnp.exp2(lses - jnp.max(lses, axis=0, keepdims=True))
    weights /= jnp.sum(weights, axis=0, keepdims=True)
    return jnp.sum(outs * weights[..., None], axis=0)
