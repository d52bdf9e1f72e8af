"""Head-group decode with Pallas Triton: the kernel of ``split_kv_decode``, told where heads lie."""

import jax.numpy as jnp

from pallas_kernels.split_kv_decode.triton import decode_heads


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
    """See ``api.head_group_decode``; for the other ``options``, ``decode_heads``."""
    n_rows, _, n_members = lengths.shape
    sources = [(group, member, group * n_members + member) for group, member in places]
    starts = jnp.zeros(n_rows, jnp.int32)
    lengths = lengths.reshape(n_rows, -1)
    return decode_heads(q, k, v, pages, starts, lengths, sources, splits, **options)
