"""Head-group decode on Hopper (Pallas Mosaic GPU): bulk copies of whole pages of one member.

An item is one row and one entry of the work list: a part of one KV head's tokens. Blocks, rings of tiles
and the arithmetic are those of ``split_kv_decode``, told that there is one KV head: a tile is then 64
tokens of it, which a page of a multiple of 8 tokens fills in whole tiles of the swizzled layout.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_group_decode.limits import padded_group
from pallas_kernels.head_group_decode.work import GROUP, HEAD, MEMBER, SPLIT, SPLITS
from pallas_kernels.merge import triton as merge
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.split_kv_decode import mosaic
from pallas_kernels.split_kv_decode.limits import ITEMS, QUERY_ROWS


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
    interpret=False,
):
    """Decode of the parts that a work list names; see ``api.head_group_decode``."""
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads, n_entries = work.counts.shape[1], len(work.entries)
    group = n_heads // n_kv_heads
    kernel = _Kernel(
        n_heads=group,
        n_kv_heads=1,
        head_dim=head_dim,
        dtype=q.dtype,
        page_size=page_size,
        n_splits=1,
        per_head=False,
        scale=scale * math.log2(math.e),
        interpret=interpret,
    )
    q = q.reshape(n_rows, n_kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded_group(group) - group), (0, 0)))
    outs, lses = plgpu.kernel(
        kernel.head_body,
        out_type=(
            jax.ShapeDtypeStruct((n_entries, n_rows, QUERY_ROWS, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n_entries, n_rows, QUERY_ROWS), jnp.float32),
        ),
        scratch_types=kernel.scratch(),
        grid=(-(-n_rows * n_entries // ITEMS),),
        grid_names=("block",),
        num_threads=2 * ITEMS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(
        q,
        k,
        v,
        pages,
        lengths,
        work.entries,
        jnp.arange(n_rows, dtype=jnp.int32) if order is None else order,
    )
    # A part of the work list has G results; one of the kernel has room for 64.
    first = jnp.where(work.places < 0, -1, lax.div(work.places, jnp.int32(group)) * QUERY_ROWS)
    parts = [RowPartials(outs.reshape(-1, head_dim), lses.reshape(-1), first, work.counts)]
    if prefix is not None:
        parts.append(prefix)
    return merge.merge_row_partials(
        parts, n_heads=n_heads, out_dtype=out_dtype, interpret=interpret
    )


@dataclasses.dataclass(frozen=True)
class _Pages:
    """The page table of one row and group, as the sibling's kernel reads it."""

    ref: Any  # [B, Q, T]
    group: jax.Array

    def __getitem__(self, index):
        row, page = index
        return self.ref[row, self.group, page]


@dataclasses.dataclass(frozen=True)
class _Column:
    """One member of the pool in copies of so many tokens, as the sibling's kernel reads it."""

    ref: Any  # [N, M, D]
    member: jax.Array
    tokens: int

    @property
    def at(self):
        return self

    def __getitem__(self, place):
        return self.ref.at[pl.ds(place * self.tokens, self.tokens), self.member]


@dataclasses.dataclass(frozen=True)
class _Kernel(mosaic._Kernel):
    """The sibling's kernel of one KV head, which each item finds in the work list."""

    def head_body(
        self,
        q_ref,  # [B, K, 8 · ceil(G / 8), D]
        k_ref,  # [N, M, D]
        v_ref,  # [N, M, D]
        pages_ref,  # [B, Q, T]
        lengths_ref,  # [B, Q, M]
        entries_ref,  # [J, 5]
        order_ref,  # [B]
        out_ref,  # [J, B, 64, D]
        lse_ref,  # [J, B, 64]
        q_smem,  # [items, 64, D]
        k_smem,  # [items · stages, 64, D]
        v_smem,  # [items · stages, 64, D]
        q_ready,
        k_ready,
        v_ready,
        k_free,
        v_free,
    ):
        warpgroup = lax.axis_index("warpgroup")
        own = lax.rem(warpgroup, jnp.int32(ITEMS))  # which of the block's items
        item = lax.axis_index("block") * ITEMS + own
        n_entries, n_rows = entries_ref.shape[0], q_ref.shape[0]
        exists = item < n_entries * n_rows
        # Entries of a row are neighbours: heads whose tokens lie in one slot run at the same time.
        entry = lax.rem(item, jnp.int32(n_entries))
        row_of = lax.div(item, jnp.int32(n_entries))

        def parts():
            fields = (HEAD, SPLIT, SPLITS, GROUP, MEMBER)
            head, split, n_splits, group, member = (entries_ref[entry, i] for i in fields)
            row = order_ref[row_of]
            part = self.tiles(row, split, n_splits, lengths_ref[row, group, member])
            return part, head, group, member

        @pl.when(warpgroup >= ITEMS)
        def _memory():
            plgpu.set_max_registers(40, action="decrease")

            @pl.when(exists)
            def _():
                part, _, group, member = parts()
                keys, values = (_Column(ref, member, self.copy_tokens) for ref in (k_ref, v_ref))
                self.stream(
                    part,
                    own,
                    _Pages(pages_ref, group),
                    (keys, k_smem, k_ready, k_free),
                    (values, v_smem, v_ready, v_free),
                )

        @pl.when(warpgroup < ITEMS)
        def _compute():
            plgpu.set_max_registers(208, action="increase")

            @pl.when(exists)
            def _():
                part, head, _, _ = parts()
                queries = q_smem.at[own, pl.ds(0, q_ref.shape[2])]
                plgpu.copy_gmem_to_smem(q_ref.at[part.row, head], queries, q_ready.at[own])
                plgpu.barrier_wait(q_ready.at[own])
                out, top, total = self.attend(
                    part,
                    own,
                    q_smem.at[own],
                    (k_ref, k_smem, k_ready, k_free),
                    (v_ref, v_smem, v_ready, v_free),
                )
                divisor = jnp.where(total == 0.0, 1.0, total)
                out_ref[entry, part.row] = out / lax.broadcast_in_dim(divisor, out.shape, [0])
                lse_ref[entry, part.row] = jnp.where(
                    total == 0.0, -jnp.inf, (top + jnp.log2(divisor)) * mosaic.LN2
                )

    def tiles(self, row, split, n_splits, length):
        """The tiles of a part of a head's ``length`` tokens."""
        tokens = jnp.int32(self.tile_tokens)
        n_tiles = lax.div(length + tokens - 1, tokens)
        share = lax.div(n_tiles + n_splits - 1, n_splits)
        first = jnp.minimum(split * share, n_tiles)
        last = jnp.minimum(first + share, n_tiles)
        whole = jnp.clip(lax.div(length, tokens), first, last)
        return mosaic._Part(row, split, jnp.int32(0), [length], length, first, whole, last)
