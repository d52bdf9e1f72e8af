"""Merge of row partials with Pallas Triton: reads only the partials that exist."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks

CHUNK_ELEMENTS_PER_WARP = 2048  # partials read at once: 64 registers of each thread
NUM_WARPS = 4
# Where rows times KV heads are fewer and have many partials, most of a device would wait for a few
# programs: each query head then has one of its own, which reads more partials at once.
FEW_PROGRAMS, MANY_PARTIALS = 256, 64


def merge_row_partials(parts, *, n_heads, out_dtype, interpret=False):  # parts: RowPartials
    """See ``api.merge_row_partials``."""
    n_rows, n_kv_heads, _ = parts[0].places.shape
    head_dim = parts[0].outs.shape[-1]
    group = n_heads // n_kv_heads
    many = max(part.places.shape[-1] for part in parts) > MANY_PARTIALS
    members = 1 if many and n_rows * n_kv_heads < FEW_PROGRAMS else group
    return blocks.call(
        functools.partial(_kernel, group=group, members=members),
        out_shape=(
            jax.ShapeDtypeStruct((n_rows, n_heads, head_dim), out_dtype),
            jax.ShapeDtypeStruct((n_rows, n_heads), jnp.float32),
        ),
        grid=(n_heads // members, n_rows),
        num_warps=NUM_WARPS,
        num_stages=2,
        interpret=interpret,
    )([operands(part) for part in parts])


def operands(part):
    """The arrays of a ``RowPartials`` in the order that ``take_in`` gets their refs."""
    return part.outs, part.lses, part.places, part.counts


def _kernel(parts, out_ref, lse_ref, *, group, members):
    """``parts``: operands of each; ``out_ref [B, H, D]``; ``lse_ref [B, H]``."""
    tile, row = pl.program_id(0), pl.program_id(1)
    head = lax.div(tile * members, group)
    first = tile * members - head * group
    rows, columns = blocks.padded(members, least=1), blocks.padded(out_ref.shape[-1])
    state = blocks.initial(rows, columns)
    for part in parts:
        state = take_in(state, part, row, head, first, group=members, num_warps=NUM_WARPS)
    store(state, out_ref, lse_ref, row, tile, group=members)


def take_in(state, part, row, head, first_member=0, *, group, num_warps):
    """Take in the partials that one row and KV head has.

    Args:
      state: ``(out [M, C], top [M], total [M])`` as in ``triton_blocks``, ``G`` at most ``M``.
      part: refs of ``operands``: ``[I, D]``, ``[I]``, ``[B, K, S]``, ``[B, K]``.
      row: of the batch.
      head: KV head.
      first_member: of its group, of those that the state holds.
      group: how many those are, ``G`` for the whole group.
      num_warps: of the program.
    """
    outs_ref, lses_ref, places_ref, counts_ref = part
    rows, columns = state[0].shape
    n_places = places_ref.shape[-1]
    chunk = max(1, num_warps * CHUNK_ELEMENTS_PER_WARP // (rows * columns))
    chunk = min(1 << (chunk.bit_length() - 1), blocks.padded(n_places, least=1))
    member = jnp.arange(rows, dtype=jnp.int32)
    column = jnp.arange(columns, dtype=jnp.int32)
    inside = (member < group)[:, None] & (column < outs_ref.shape[-1])[None, :]

    def add(i, state):
        out, top, total = state
        index = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        first = plt.load(places_ref.at[row, head, index], mask=index < n_places, other=-1)
        present = (first >= 0)[:, None] & (member < group)[None, :]
        place = first[:, None] + first_member + member[None, :]
        lse = plt.load(lses_ref.at[place], mask=present, other=-jnp.inf) * blocks.LOG2E
        parts = plt.load(
            outs_ref.at[place[:, :, None], column[None, None, :]],
            mask=present[:, :, None] & inside[None],
            other=0.0,
        )
        new_top = jnp.maximum(top, jnp.max(lse, axis=0))
        finite_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        decay, weight = jnp.exp2(top - finite_top), jnp.exp2(lse - finite_top[None, :])
        out = out * decay[:, None] + jnp.sum(parts * weight[:, :, None], axis=0)
        return out, new_top, total * decay + jnp.sum(weight, axis=0)

    # The first chunk waits for nothing but its own places; how many follow is read meanwhile.
    state = add(0, state)
    if n_places > chunk:
        n_chunks = lax.div(counts_ref[row, head] + chunk - 1, chunk)
        state = lax.fori_loop(1, n_chunks, add, state)
    return state


def store(state, out_ref, lse_ref, *place, group):
    """Write a state's result to ``[*place[:-1], H, D]`` and ``[*place[:-1], H]``.

    Args:
      state: ``(out [M, C], top [M], total [M])``.
      out_ref: outputs, in the type to store.
      lse_ref: log-sum-exps.
      place: indices before the head, and the KV head.
      group: ``G``; members past it are padding.
    """
    out, lse = blocks.finish(state)
    rows, columns = out.shape
    member = jnp.arange(rows, dtype=jnp.int32)
    column = jnp.arange(columns, dtype=jnp.int32)
    *outer, head = place
    heads, kept = head * group + member, member < group
    plt.store(
        out_ref.at[(*outer, heads[:, None], column[None, :])],
        out.astype(out_ref.dtype),
        mask=kept[:, None] & (column < out_ref.shape[-1])[None, :],
    )
    plt.store(lse_ref.at[(*outer, heads)], lse, mask=kept)
