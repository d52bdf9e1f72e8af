"""Split-KV decode with Pallas Triton: gathered loads of 16-bit or 32-bit rows, sm_80 and later.

One program takes one row, one KV head and one of the head's splits. All programs of a row are
neighbours in the grid, so that the heads of a token, adjacent in memory, are read together.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks
from pallas_kernels import tuning
from pallas_kernels.merge import xla as merge

LEAST_SPLIT_TOKENS = 64  # a part of fewer tokens costs more to merge than it saves


def split_kv_decode(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    pages,  # [B, T]
    starts,  # [B]
    lengths,  # [B] or [B, K]
    *,
    page_size,
    scale,
    splits=None,
    knobs=None,
    interpret=False,
):
    """See ``api.split_kv_decode``. ``knobs``: ``block``, ``num_warps``, ``num_stages``; tuned if None."""
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    group = n_heads // n_kv_heads
    if splits is None:
        splits = (even_splits(n_rows * n_kv_heads, pages.shape[1] * page_size),) * n_kv_heads
    table = np.array([(h, s, n) for h, n in enumerate(splits) for s in range(n)], np.int32)
    knobs = tuned(head_dim, group) if knobs is None else knobs
    kernel = functools.partial(
        _kernel, page_size=page_size, scale=scale * blocks.LOG2E, block=knobs["block"], group=group
    )
    outs, lses = blocks.call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((max(splits), n_rows, n_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((max(splits), n_rows, n_heads), jnp.float32),
        ),
        grid=(len(table), n_rows),
        num_warps=knobs["num_warps"],
        num_stages=knobs["num_stages"],
        interpret=interpret,
    )(
        q.reshape(n_rows, n_kv_heads, group, head_dim),
        k,
        v,
        pages,
        starts,
        lengths,
        jnp.asarray(table),
    )
    return _merge_splits(outs, lses, splits)


def even_splits(n_programs, n_tokens):
    """Parts of each row where no table says: enough for two programs a multiprocessor."""
    device = jax.local_devices()[0]
    wanted = 2 * device.core_count if device.platform == "gpu" else 1
    return max(1, min(-(-wanted // n_programs), n_tokens // LEAST_SPLIT_TOKENS))


def tuned(head_dim, group):
    """Tokens of a block, warps and pipeline stages for a head shape on this device."""
    return tuning.lookup(
        "split_kv_decode",
        {"head_dim": blocks.padded(head_dim), "group": group},
        exact=("head_dim",),
        fallback={"block": 64 if head_dim <= 128 else 32, "num_warps": 4, "num_stages": 2},
    )


def _kernel(
    q_ref,  # [B, K, G, D]
    k_ref,  # [N, K, D]
    v_ref,  # [N, K, D]
    pages_ref,  # [B, T]
    starts_ref,  # [B]
    lengths_ref,  # [B] or [B, K]
    table_ref,  # [J, 3]
    out_ref,  # [S, B, H, D]
    lse_ref,  # [S, B, H]
    *,
    page_size,
    scale,
    block,
    group,
):
    entry, row = pl.program_id(0), pl.program_id(1)
    head, split, n_splits = table_ref[entry, 0], table_ref[entry, 1], table_ref[entry, 2]
    head_dim = q_ref.shape[-1]
    member = jnp.arange(blocks.padded(group), dtype=jnp.int32)
    column = jnp.arange(blocks.padded(head_dim), dtype=jnp.int32)
    real = column < head_dim
    q_index = (row, head, jnp.minimum(member, group - 1)[:, None], column[None, :])
    q = plt.load(
        q_ref.at[q_index],
        mask=jnp.broadcast_to(real[None, :], (len(member), len(column))),
        other=0.0,
    )

    start = starts_ref[row]
    length = lengths_ref[row] if len(lengths_ref.shape) == 1 else lengths_ref[row, head]
    n_blocks = lax.div(jnp.maximum(length - start, 0) + block - 1, block)
    share = lax.div(n_blocks + n_splits - 1, n_splits)
    first = jnp.minimum(split * share, n_blocks)
    last = jnp.minimum(first + share, n_blocks)

    def attend(i, state):
        token = start + i * block + jnp.arange(block, dtype=jnp.int32)
        mask = token < length
        page = plt.load(pages_ref.at[row, lax.div(token, page_size)], mask=mask, other=0)
        slot = page * page_size + lax.rem(token, page_size)
        index = (slot[:, None], head, column[None, :])
        inside = mask[:, None] & real[None, :]
        keys = plt.load(k_ref.at[index], mask=inside, other=0.0)
        values = plt.load(v_ref.at[index], mask=inside, other=0.0)
        return blocks.update(state, q, keys, values, mask, scale)

    state = lax.fori_loop(first, last, attend, blocks.initial(len(member), len(column)))
    out, lse = blocks.finish(state)
    kept, heads = member < group, head * group + member
    plt.store(
        out_ref.at[split, row, heads[:, None], column[None, :]],
        out,
        mask=kept[:, None] & real[None, :],
    )
    plt.store(lse_ref.at[split, row, heads], lse, mask=kept)


def _merge_splits(outs, lses, splits):
    """Partials ``[S, B, H, D]``, ``[S, B, H]``, of which a head has its own number, to one."""
    n_splits, _, n_heads, _ = outs.shape
    if n_splits == 1:
        return outs[0], lses[0]
    group = n_heads // len(splits)
    present = np.arange(n_splits)[:, None] < np.repeat(splits, group)[None, :]  # [S, H]
    present = jnp.asarray(present)[:, None, :]
    outs = jnp.where(present[..., None], outs, 0.0)
    return merge.merge_partials(outs, jnp.where(present, lses, -jnp.inf))
