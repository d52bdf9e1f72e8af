"""Segment attention with Pallas Triton, sm_80 and later: enters a schedule, leaves partial results.

One program takes one item of the schedule. It reads keys in order or, with ``slots``, by gathered
loads, so shared paged prefixes run here too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.rows import fold_rows
from pallas_kernels.segment_attention import schedule as plan
from pallas_kernels.segment_attention.schedule import Schedule


def segment_partials(
    q,  # [B, H, D]
    k,  # [N, K, D]
    v,  # [N, K, D]
    schedule: Schedule,
    *,
    scale,
    slots=None,  # [I]
    num_warps=8,
    num_stages=2,
    interpret=False,
) -> RowPartials:
    """See ``api.segment_partials``."""
    head_dim, n_kv_heads = q.shape[-1], k.shape[1]
    n_items, row_tile = schedule.items.shape[0], schedule.row_tile
    kernel = functools.partial(
        _kernel,
        scale=scale * blocks.LOG2E,
        group=q.shape[1] // n_kv_heads,
        kv_tile=_block(schedule, head_dim),
        steps_per_tile=schedule.kv_tile // _block(schedule, head_dim),
        redirect=slots is not None,
        causal=schedule.causal,
    )
    outs, lses = blocks.call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((n_items, row_tile, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n_items, row_tile), jnp.float32),
        ),
        grid=(n_items,),
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )(
        fold_rows(q, n_kv_heads, plan.folded_rows(q.shape[0], kernel.keywords["group"], row_tile)),
        k,
        v,
        jnp.asarray(schedule.items),
        jnp.zeros((1,), jnp.int32) if slots is None else slots,
    )
    return schedule.partials(outs, lses)


def _block(schedule, head_dim):
    """Keys of one block: what the registers of a program hold beside its rows."""
    return min(schedule.kv_tile, 64 if blocks.padded(head_dim) <= 128 else 32)


def _kernel(
    q_ref,  # [K, M, D]
    k_ref,  # [N, K, D]
    v_ref,  # [N, K, D]
    items_ref,  # [I, FIELDS]
    slots_ref,  # [I] or [1]
    out_ref,  # [I, row_tile, D]
    lse_ref,  # [I, row_tile]
    *,
    scale,
    group,
    kv_tile,
    steps_per_tile,
    redirect,
    causal,
):
    item = pl.program_id(0)
    head, first_row = items_ref[item, plan.HEAD], items_ref[item, plan.ROW]
    base, steps = items_ref[item, plan.BASE], items_ref[item, plan.STEPS]
    begin, end = items_ref[item, plan.KV_BEGIN], items_ref[item, plan.KV_END]
    diagonal = items_ref[item, plan.DIAGONAL]
    row_tile, head_dim = out_ref.shape[-2:]
    row = jnp.arange(row_tile, dtype=jnp.int32)
    column = jnp.arange(blocks.padded(head_dim), dtype=jnp.int32)
    real = (column < head_dim)[None, :]
    q = plt.load(
        q_ref.at[head, first_row + row[:, None], column[None, :]],
        mask=jnp.broadcast_to(real, (row_tile, len(column))),
        other=0.0,
    )

    def attend(i, state):
        index = base + i * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32)
        mask = (index >= begin) & (index < end)
        slot = plt.load(slots_ref.at[index], mask=mask, other=0) if redirect else index
        place = (slot[:, None], head, column[None, :])
        inside = mask[:, None] & real
        keys = plt.load(k_ref.at[place], mask=inside, other=0.0)
        values = plt.load(v_ref.at[place], mask=inside, other=0.0)
        if causal:  # index <= diagonal + folded row // group, without the division
            seen = ((index - diagonal) * group)[None, :] <= first_row + row[:, None]
            mask = mask[None, :] & seen
        return blocks.update(state, q, keys, values, mask, scale)

    # Blocks before the range or after it are skipped.
    first = lax.div(begin - base, kv_tile)
    last = jnp.minimum(steps * steps_per_tile, lax.div(end - base + kv_tile - 1, kv_tile))
    state = lax.fori_loop(first, last, attend, blocks.initial(row_tile, len(column)))
    out, lse = blocks.finish(state)
    plt.store(
        out_ref.at[item, row[:, None], column[None, :]],
        out,
        mask=jnp.broadcast_to(real, out.shape),
    )
    plt.store(lse_ref.at[item, row], lse)
