"""Attention of one row and KV head to its tokens in pages, inside a Pallas Triton program.

Enter refs, and which part of the tokens the program takes; leaves a state of ``triton_blocks``.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_blocks as blocks


def attend_part(
    q_ref,  # [K, B · G, D]
    k_ref,  # [N, C, D]
    v_ref,  # [N, C, D]
    pages_ref,  # [..., T]
    *,
    row,
    head,
    table,
    column,
    start,
    length,
    split,
    n_splits,
    page_size,
    scale,
    block,
    group,
):
    """The state of the row's query group over part ``split`` of ``n_splits`` of its tokens.

    Args:
      q_ref: folded queries.
      k_ref: keys of the pool.
      v_ref: values of the pool.
      pages_ref: page tables.
      row: of the batch.
      head: KV head, of ``q_ref``.
      table: indices of the page table in ``pages_ref``.
      column: where the head lies in a slot of the pool.
      start: first token, a multiple of ``page_size``.
      length: token after the last.
      split: which part; one numbered ``n_splits`` is empty.
      n_splits: parts of whole blocks, the last ones of which may be empty.
      page_size: tokens of a page.
      scale: factor of the scores, times log2(e).
      block: tokens at once.
      group: ``G``.
    """
    head_dim = q_ref.shape[-1]
    member = jnp.arange(blocks.padded(group), dtype=jnp.int32)
    place = jnp.arange(blocks.padded(head_dim), dtype=jnp.int32)
    real = place < head_dim
    folded = row * group + jnp.minimum(member, group - 1)
    q = plt.load(
        q_ref.at[head, folded[:, None], place[None, :]],
        mask=jnp.broadcast_to(real[None, :], (len(member), len(place))),
        other=0.0,
    )
    n_blocks = lax.div(jnp.maximum(length - start, 0) + block - 1, block)
    share = lax.div(n_blocks + n_splits - 1, n_splits)
    first = jnp.minimum(split * share, n_blocks)
    last = jnp.minimum(first + share, n_blocks)

    def attend(i, state):
        token = start + i * block + jnp.arange(block, dtype=jnp.int32)
        mask = token < length
        page = plt.load(pages_ref.at[(*table, lax.div(token, page_size))], mask=mask, other=0)
        slot = page * page_size + lax.rem(token, page_size)
        index = (slot[:, None], column, place[None, :])
        inside = mask[:, None] & real[None, :]
        keys = plt.load(k_ref.at[index], mask=inside, other=0.0)
        values = plt.load(v_ref.at[index], mask=inside, other=0.0)
        return blocks.update(state, q, keys, values, mask, scale)

    return lax.fori_loop(first, last, attend, blocks.initial(len(member), len(place)))
