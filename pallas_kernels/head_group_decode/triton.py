"""Head-group decode with Pallas Triton: gathered loads of 16-bit or 32-bit rows, sm_80 and later.

One program takes one row and one entry of the work list: a part of one KV head's tokens. Where nothing
is cut, a program also merges the row's prefix partials; else one more kernel merges both.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_blocks as blocks
from pallas_kernels import tuning
from pallas_kernels.head_group_decode.work import (
    GROUP,
    HEAD,
    MEMBER,
    SPLIT,
    SPLITS,
    make_work,
)
from pallas_kernels.merge import triton as merge
from pallas_kernels.paged_tokens import attend_part
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.rows import fold_rows


def tuned(head_dim, group):
    """Tokens of a block, warps and pipeline stages for a head shape on this device."""
    return tuning.lookup(
        "head_group_decode",
        {"head_dim": blocks.padded(head_dim), "group": group},
        exact=("head_dim",),
        fallback={"block": 64 if head_dim <= 128 else 32, "num_warps": 4, "num_stages": 3},
    )


def head_group_decode(
    q,  # [B, H, D]
    k,  # [N, M, D]
    v,  # [N, M, D]
    pages,  # [B, Q, T]
    lengths,  # [B, Q, M]
    places,  # K × (group, member)
    *,
    splits,
    **options,
):
    """See ``api.head_group_decode``; for the other ``options``, ``decode_work``."""
    n_rows, n_heads, _ = q.shape
    work = make_work(places, splits, n_rows=n_rows, group=n_heads // len(places))
    work = jax.tree.map(jnp.asarray, work)
    return decode_work(q, k, v, pages, lengths, work, **options)


def decode_work(
    q,  # [B, H, D]
    k,  # [N, M, D]
    v,  # [N, M, D]
    pages,  # [B, Q, T]
    lengths,  # [B, Q, M]
    work,  # DecodeWork
    order=None,  # [B]
    prefix=None,  # RowPartials
    *,
    page_size,
    scale,
    out_dtype=jnp.float32,
    knobs=None,
    interpret=False,
):
    """Decode of the parts that a work list names; see ``api.head_group_decode``.

    ``knobs``: pairs of ``block``, ``num_warps``, ``num_stages`` and their numbers; tuned if None.
    """
    n_rows, n_heads, head_dim = q.shape
    _, n_kv_heads, width = work.places.shape
    group, n_entries = n_heads // n_kv_heads, len(work.entries)
    whole = width == 1
    # Parts lie one behind the other; of heads that are not cut the result is that of the layer.
    leading = (1, n_rows, n_heads) if whole else (n_entries, n_rows, group)
    knobs = dict(tuned(head_dim, group) if knobs is None else knobs)
    outs, lses = blocks.call(
        functools.partial(
            _kernel,
            page_size=page_size,
            scale=scale * blocks.LOG2E,
            block=knobs["block"],
            num_warps=knobs["num_warps"],
            group=group,
            whole=whole,
        ),
        out_shape=(
            jax.ShapeDtypeStruct((*leading, head_dim), out_dtype if whole else jnp.float32),
            jax.ShapeDtypeStruct(leading, jnp.float32),
        ),
        grid=(n_entries, n_rows),
        num_warps=knobs["num_warps"],
        num_stages=knobs["num_stages"],
        interpret=interpret,
    )(
        fold_rows(q, n_kv_heads),
        k,
        v,
        pages,
        lengths,
        work.entries,
        order,
        merge.operands(prefix) if whole and prefix is not None else None,
    )
    if whole:
        return outs[0], lses[0]
    parts = [RowPartials(outs.reshape(-1, head_dim), lses.reshape(-1), work.places, work.counts)]
    if prefix is not None:
        parts.append(prefix)
    return merge.merge_row_partials(
        parts, n_heads=n_heads, out_dtype=out_dtype, interpret=interpret
    )


def _kernel(
    q_ref,  # [K, B · G, D]
    k_ref,  # [N, M, D]
    v_ref,  # [N, M, D]
    pages_ref,  # [B, Q, T]
    lengths_ref,  # [B, Q, M]
    entries_ref,  # [J, 5]
    order_ref,  # [B] or None
    prefix_refs,  # of merge.operands, or None
    out_ref,  # [1, B, H, D] or [J, B, G, D]
    lse_ref,  # [1, B, H] or [J, B, G]
    *,
    page_size,
    scale,
    block,
    num_warps,
    group,
    whole,
):
    entry, row = pl.program_id(0), pl.program_id(1)
    if order_ref is not None:
        row = order_ref[row]
    head, split, n_splits, table, member = (
        entries_ref[entry, field] for field in (HEAD, SPLIT, SPLITS, GROUP, MEMBER)
    )
    state = attend_part(
        q_ref,
        k_ref,
        v_ref,
        pages_ref,
        row=row,
        head=head,
        table=(row, table),
        column=member,
        start=0,
        length=lengths_ref[row, table, member],
        split=split,
        n_splits=n_splits,
        page_size=page_size,
        scale=scale,
        block=block,
        group=group,
    )
    if prefix_refs is not None:
        state = merge.take_in(state, prefix_refs, row, head, group=group, num_warps=num_warps)
    place = (0, row, head) if whole else (entry, row, 0)
    merge.store(state, out_ref, lse_ref, *place, group=group)
