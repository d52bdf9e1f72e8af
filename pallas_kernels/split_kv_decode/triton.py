"""Split-KV decode with Pallas Triton: gathered loads of 16-bit or 32-bit rows, sm_80 and later.

One program takes one row, one KV head and one of the head's splits. All programs of a row are
neighbours in the grid, so that the heads of a token, adjacent in memory, are read together. Where
nothing is split, a program also merges the row's prefix partials; else one more kernel merges both.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import triton_blocks as blocks
from pallas_kernels import tuning
from pallas_kernels.merge import triton as merge
from pallas_kernels.paged_tokens import attend_part
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.rows import fold_rows
from pallas_kernels.split_kv_decode.splits import even_splits, split_partials

HEAD, SPLIT, SPLITS = range(3)


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
    order=None,  # [B]
    prefix: RowPartials | None = None,
    out_dtype=jnp.float32,
    knobs=None,
    interpret=False,
):
    """See ``api.split_kv_decode``; ``knobs``: ``block``, ``num_warps``, ``num_stages``, else tuned."""
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    group = n_heads // n_kv_heads
    if splits is None:
        n_tokens = pages.shape[1] * page_size
        splits = (even_splits(n_rows * n_kv_heads, n_tokens),) * n_kv_heads
    entries = [(h, part, n_parts) for h, n_parts in enumerate(splits) for part in range(n_parts)]
    # The heads of a token lie in one slot and start together: the second finds its lines on their way.
    entries.sort(key=lambda entry: (entry[SPLIT], entry[HEAD]))
    n_splits = max(splits)
    whole = n_splits == 1
    knobs = tuned(head_dim, group, len(entries) * n_rows) if knobs is None else knobs
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
        grid=(len(entries), n_rows),
        num_warps=knobs["num_warps"],
        num_stages=knobs["num_stages"],
        interpret=interpret,
    )(
        fold_rows(q, n_kv_heads),
        k,
        v,
        pages,
        starts,
        lengths.reshape(n_rows, -1),
        jnp.asarray(np.array(entries, np.int32)),
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
    k_ref,  # [N, K, D]
    v_ref,  # [N, K, D]
    pages_ref,  # [B, T]
    starts_ref,  # [B]
    lengths_ref,  # [B, 1] or [B, K]
    entries_ref,  # [J, 3]
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
    head, split, n_splits = (entries_ref[entry, field] for field in (HEAD, SPLIT, SPLITS))
    state = attend_part(
        q_ref,
        k_ref,
        v_ref,
        pages_ref,
        row=row,
        head=head,
        table=(row,),
        column=head,
        start=starts_ref[row],
        length=lengths_ref[row, 0 if lengths_ref.shape[1] == 1 else head],
        split=split,
        n_splits=n_splits,
        page_size=page_size,
        scale=scale,
        block=block,
        group=group,
    )
    if prefix_refs is not None:
        state = merge.take_in(state, prefix_refs, row, head, group=group, num_warps=num_warps)
    merge.store(state, out_ref, lse_ref, split, row, head, group=group)
