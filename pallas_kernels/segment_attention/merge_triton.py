"""Merge of a schedule's partials on a GPU (Pallas Triton): reads only the partials that exist."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks
from pallas_kernels.segment_attention.schedule import Schedule

CHUNK = 8  # partials of a row that are read at once


def merge_pieces(outs, lses, schedule: Schedule, n_heads: int, *, interpret=False):
    """Merge the partials of each row.

    Args:
      outs: ``[I, row_tile, D]`` float32, normalised; unwritten ones may hold anything.
      lses: ``[I, row_tile]`` float32, their natural log-sum-exps, finite.
      schedule: whose ``pieces`` and ``counts`` say which partials belong to a row.
      n_heads: ``H``.
      interpret: whether to run in the interpreter.

    Returns:
      ``(out, lse)``, ``[B, H, D]`` and ``[B, H]``, float32; ``(0, -inf)`` where a row has none.
    """
    n_rows, n_kv_heads, _ = schedule.pieces.shape
    group, head_dim = n_heads // n_kv_heads, outs.shape[-1]
    out, lse = blocks.call(
        functools.partial(_kernel, group=group),
        out_shape=(
            jax.ShapeDtypeStruct((n_rows, n_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n_rows, n_heads), jnp.float32),
        ),
        grid=(n_kv_heads, n_rows),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
    )(
        outs.reshape(-1, head_dim),
        lses.reshape(-1),
        jnp.asarray(schedule.pieces),
        jnp.asarray(schedule.counts),
    )
    return out, lse


def _kernel(
    outs_ref,  # [I · row_tile, D]
    lses_ref,  # [I · row_tile]
    pieces_ref,  # [B, K, S]
    counts_ref,  # [B, K]
    out_ref,  # [B, H, D]
    lse_ref,  # [B, H]
    *,
    group,
):
    head, row = pl.program_id(0), pl.program_id(1)
    head_dim, n_pieces = outs_ref.shape[-1], pieces_ref.shape[-1]
    member = jnp.arange(blocks.padded(group, least=1), dtype=jnp.int32)
    column = jnp.arange(blocks.padded(head_dim), dtype=jnp.int32)
    kept = member < group
    inside = kept[:, None] & (column < head_dim)[None, :]
    chunk = min(CHUNK, blocks.padded(n_pieces, least=1))

    def add(i, state):
        out, top, total = state
        index = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        piece = plt.load(pieces_ref.at[row, head, index], mask=index < n_pieces, other=-1)
        present = (piece >= 0)[:, None] & kept[None, :]
        place = piece[:, None] + member[None, :]
        lse = plt.load(lses_ref.at[place], mask=present, other=-jnp.inf)
        parts = plt.load(
            outs_ref.at[place[:, :, None], column[None, None, :]],
            mask=present[:, :, None] & inside[None],
            other=0.0,
        )
        new_top = jnp.maximum(top, jnp.max(lse, axis=0))
        finite_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        decay, weight = jnp.exp(top - finite_top), jnp.exp(lse - finite_top[None, :])
        out = out * decay[:, None] + jnp.sum(parts * weight[:, :, None], axis=0)
        return out, new_top, total * decay + jnp.sum(weight, axis=0)

    # The first chunk waits for nothing but its own places; how many follow is read meanwhile.
    state = add(0, blocks.initial(len(member), len(column)))
    if n_pieces > chunk:
        n_chunks = lax.div(counts_ref[row, head] + chunk - 1, chunk)
        state = lax.fori_loop(1, n_chunks, add, state)
    out, top, total = state
    empty = total == 0.0
    divisor = jnp.where(empty, 1.0, total)
    heads = head * group + member
    plt.store(out_ref.at[row, heads[:, None], column[None, :]], out / divisor[:, None], mask=inside)
    plt.store(lse_ref.at[row, heads], jnp.where(empty, -jnp.inf, top + jnp.log(divisor)), mask=kept)
