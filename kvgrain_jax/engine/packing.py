"""Packing of prompt tokens of several requests into one prefill chunk of fixed shape."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvgrain_jax.attention import ChunkPart, HotPiece, KernelShape, make_prefill_plan
from kvgrain_jax.engine.prefill_step import Chunk


class PromptPart(NamedTuple):
    """The prompt tokens ``[first, first + n_tokens)`` of one request.

    Attributes:
      row: its row in the batch.
      prompt: all its prompt tokens.
      first: first token to compute.
      n_tokens: how many.
      hot: the contiguous pieces at the front of its context.
    """

    row: int
    prompt: np.ndarray
    first: int
    n_tokens: int
    hot: tuple[HotPiece, ...]

    @property
    def completes(self) -> bool:
        """Whether the last prompt token is in this part."""
        return self.first + self.n_tokens == self.prompt.size


def pack_chunk(
    parts: Sequence[PromptPart],
    *,
    size: int,
    n_rows: int,
    row_tokens: int,
    n_slots: int,
    max_parts: int,
    max_pieces: int,
    max_staged: int = 0,
    kernels: KernelShape | None = None,
) -> Chunk:
    """Pack parts one behind the other. The shapes depend on the keyword arguments only.

    Args:
      parts: at most ``max_parts``, together at most ``size`` tokens.
      size: tokens of the chunk.
      n_rows: ``B``, rows of the batch; names the row of padding.
      row_tokens: tokens of a row's page table.
      n_slots: ``N``, slots of the pool.
      max_parts: capacity in requests.
      max_pieces: contiguous pieces of a chunk beyond one for each request that are read as such;
        further ones are read through the page tables.
      max_staged: earlier tokens in pages that are copied side by side before they are read.
      kernels: shape to schedule the GPU kernels for.
    """
    tokens = np.zeros(size, np.int32)
    positions = np.full(size, -1, np.int32)
    rows = np.full(size, n_rows, np.int32)
    last = np.zeros(max_parts, np.int32)
    last_rows = np.full(max_parts, n_rows, np.int32)
    lengths = np.zeros(max_parts, np.int32)
    chunk_parts = []
    start = 0
    for i, part in enumerate(parts):
        span = slice(start, start + part.n_tokens)
        start += part.n_tokens
        tokens[span] = part.prompt[part.first : part.first + part.n_tokens]
        positions[span] = np.arange(part.first, part.first + part.n_tokens)
        rows[span] = part.row
        chunk_parts.append(ChunkPart(part.row, part.first, part.n_tokens, part.hot))
        if part.completes:
            last[i], last_rows[i], lengths[i] = start - 1, part.row, part.prompt.size
    return Chunk(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        rows=jnp.asarray(rows),
        last=jnp.asarray(last),
        last_rows=jnp.asarray(last_rows),
        lengths=jnp.asarray(lengths),
        plan=make_prefill_plan(
            chunk_parts,
            n_tokens=size,
            n_rows=n_rows,
            row_tokens=row_tokens,
            n_slots=n_slots,
            max_parts=max_parts,
            max_pieces=max_pieces,
            max_staged=max_staged,
            kernels=kernels,
        ),
    )
