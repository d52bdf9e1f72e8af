"""Split-KV decode with Pallas Triton: gathered loads of 16-bit or 32-bit rows, sm_80 and later.

One program takes one row, one KV head and one of the head's splits. All programs of a row are
neighbours in the grid, so that the heads of a token, adjacent in memory, are read together. Where
nothing is split, a program also merges the row's prefix partials; else one more kernel merges both.
Where the tokens of a KV head lie (page table, column of the pool, length) is a static table.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks
from pallas_kernels import tuning
from pallas_kernels.merge import triton as merge
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.rows import fold_rows
from pallas_kernels.split_kv_decode.splits import even_splits, split_partials

HEAD, SPLIT, SPLITS, TABLE, COLUMN, LENGTH = range(6)


def split_kv_decode(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    pages,  # [B, T]
    starts,  # [B]
    lengths,  # [B] or [B, K]
    *,
    splits=None,
    **options,
):
    """See ``api.split_kv_decode``; for the other ``options``, ``decode_heads``."""
    n_rows, n_kv_heads = q.shape[0], k.shape[1]
    if splits is None:
        n_tokens = pages.shape[1] * options["page_size"]
        splits = (even_splits(n_rows * n_kv_heads, n_tokens),) * n_kv_heads
    shared = lengths.ndim == 1
    sources = [(0, head, 0 if shared else head) for head in range(n_kv_heads)]
    lengths = lengths.reshape(n_rows, -1)
    return decode_heads(q, k, v, pages[:, None], starts, lengths, sources, splits, **options)


def tuned(head_dim, group, n_programs):
    """Tokens of a block, warps and pipeline stages for a head shape on this device.

    Few programs need more loads in flight each, many run better with one warp each.
    """
    return tuning.lookup(
        "split_kv_decode",
        {"head_dim": blocks.padded(head_dim), "group": group, "programs": n_programs},
        exact=("head_dim",),
        fallback={"block": 64 if head_dim <= 128 else 32, "num_warps": 4, "num_stages": 2},
    )


def decode_heads(
    q,  # [B, H, D]
    k,  # [N, C, D]
    v,  # [N, C, D]
    pages,  # [B, Q, T]
    starts,  # [B]
    lengths,  # [B, W]
    sources: Sequence[tuple[int, int, int]],
    splits: Sequence[int],
    *,
    page_size,
    scale,
    order=None,  # [B]
    prefix: RowPartials | None = None,
    out_dtype=jnp.float32,
    knobs=None,
    interpret=False,
):
    """Decode of KV heads that may lie anywhere: ``(out [B, H, D], lse [B, H])``.

    Args:
      q: queries.
      k: keys of the whole pool.
      v: values of the whole pool.
      pages: the page tables of each row.
      starts: first token of each row.
      lengths: token after the last.
      sources: for each KV head its page table (of ``Q``), its column of the pool (of ``C``) and
        that of ``lengths`` (of ``W``).
      splits: parts of each KV head's tokens.
      page_size: tokens of a page.
      scale: factor of the scores.
      order: rows in the order in which they start; None takes them as they come.
      prefix: partials to merge with.
      out_dtype: of the output.
      knobs: ``block``, ``num_warps``, ``num_stages``; tuned if None.
      interpret: whether to run in the interpreter.
    """
    n_rows, n_heads, head_dim = q.shape
    group = n_heads // len(sources)
    table = [
        (head, split, n_splits, *source)
        for head, (source, n_splits) in enumerate(zip(sources, splits, strict=True))
        for split in range(n_splits)
    ]
    # Heads whose tokens lie in one slot start together: the second finds its lines on their way.
    table.sort(key=lambda entry: (entry[TABLE], entry[SPLIT], entry[COLUMN]))
    n_splits = max(splits)
    whole = n_splits == 1
    knobs = tuned(head_dim, group, len(table) * n_rows) if knobs is None else knobs
    outs, lses = blocks.call(
        functools.partial(
            _kernel,
            page_size=page_size,
            scale=scale * blocks.LOG2E,
            block=knobs["block"],
            num_warps=knobs["num_warps"],
            group=group,
        ),
        out_shape=(
            jax.ShapeDtypeStruct(
                (n_splits, n_rows, n_heads, head_dim), out_dtype if whole else jnp.float32
            ),
            jax.ShapeDtypeStruct((n_splits, n_rows, n_heads), jnp.float32),
        ),
        grid=(len(table), n_rows),
        num_warps=knobs["num_warps"],
        num_stages=knobs["num_stages"],
        interpret=interpret,
    )(
        fold_rows(q, len(sources)),
        k,
        v,
        pages,
        starts,
        lengths,
        jnp.asarray(np.array(table, np.int32)),
        order,
        merge.operands(prefix) if whole and prefix is not None else None,
    )
    if whole:
        return outs[0], lses[0]
    parts = [split_partials(outs, lses, splits, group)]
    if prefix is not None:
        parts.append(prefix)
    return merge.merge_row_partials(
        parts, n_heads=n_heads, out_dtype=out_dtype, interpret=interpret
    )


def _kernel(
    q_ref,  # [K, B · G, D]
    k_ref,  # [N, C, D]
    v_ref,  # [N, C, D]
    pages_ref,  # [B, Q, T]
    starts_ref,  # [B]
    lengths_ref,  # [B, W]
    table_ref,  # [J, 6]
    order_ref,  # [B] or None
    prefix_refs,  # of merge.operands, or None
    out_ref,  # [S, B, H, D]
    lse_ref,  # [S, B, H]
    *,
    page_size,
    scale,
    block,
    num_warps,
    group,
):
    entry, row = pl.program_id(0), pl.program_id(1)
    if order_ref is not None:
        row = order_ref[row]
    head, split, n_splits, table, pool_column, length_column = (
        table_ref[entry, field] for field in (HEAD, SPLIT, SPLITS, TABLE, COLUMN, LENGTH)
    )
    head_dim = q_ref.shape[-1]
    member = jnp.arange(blocks.padded(group), dtype=jnp.int32)
    column = jnp.arange(blocks.padded(head_dim), dtype=jnp.int32)
    real = column < head_dim
    folded = row * group + jnp.minimum(member, group - 1)
    q_index = (head, folded[:, None], column[None, :])
    q = plt.load(
        q_ref.at[q_index],
        mask=jnp.broadcast_to(real[None, :], (len(member), len(column))),
        other=0.0,
    )

    start, length = starts_ref[row], lengths_ref[row, length_column]
    n_blocks = lax.div(jnp.maximum(length - start, 0) + block - 1, block)
    share = lax.div(n_blocks + n_splits - 1, n_splits)
    first = jnp.minimum(split * share, n_blocks)
    last = jnp.minimum(first + share, n_blocks)

    def attend(i, state):
        token = start + i * block + jnp.arange(block, dtype=jnp.int32)
        mask = token < length
        page = plt.load(pages_ref.at[row, table, lax.div(token, page_size)], mask=mask, other=0)
        slot = page * page_size + lax.rem(token, page_size)
        index = (slot[:, None], pool_column, column[None, :])
        inside = mask[:, None] & real[None, :]
        keys = plt.load(k_ref.at[index], mask=inside, other=0.0)
        values = plt.load(v_ref.at[index], mask=inside, other=0.0)
        return blocks.update(state, q, keys, values, mask, scale)

    state = lax.fori_loop(first, last, attend, blocks.initial(len(member), len(column)))
    if prefix_refs is not None:
        state = merge.take_in(state, prefix_refs, row, head, group=group, num_warps=num_warps)
    merge.store(state, out_ref, lse_ref, split, row, head, group=group)
