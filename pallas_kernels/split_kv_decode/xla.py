"""Split-KV decode in XLA: the specification. A loop over chunks of tokens, all rows at once."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.merge import xla as merge

CHUNK_TOKENS = 64  # a multiple of every page size


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
    prefix=None,
    out_dtype=jnp.float32,
):
    """See ``api.split_kv_decode``."""
    out, lse = decode_tokens(q, k, v, pages, starts, lengths, page_size=page_size, scale=scale)
    return merge.merge_with(out, lse, prefix, out_dtype)


def decode_tokens(q, k, v, pages, starts, lengths, *, page_size, scale, column=None):
    """The rows' own tokens only, in float32.

    ``column``: the one KV head of the pool, of all, that ``q`` reads.
    """
    n_rows, n_heads, head_dim = q.shape
    n_slots = k.shape[0]
    n_kv_heads = k.shape[1] if column is None else 1
    group = n_heads // n_kv_heads
    chunk_pages = max(1, CHUNK_TOKENS // page_size)
    chunk_tokens = chunk_pages * page_size
    q = q.reshape(n_rows, n_kv_heads, group, head_dim)
    ends = lengths if lengths.ndim == 1 else jnp.max(lengths, axis=1)

    def read(x, page):
        paged = x.reshape(n_slots // page_size, page_size, -1, head_dim)
        tokens = paged[page] if column is None else paged[page, :, column]
        return tokens.reshape(n_rows, chunk_tokens, n_kv_heads, head_dim)

    def chunk(i, state):
        first = starts + i * chunk_tokens
        place = first[:, None] // page_size + jnp.arange(chunk_pages, dtype=jnp.int32)[None, :]
        page = jnp.take_along_axis(pages, place, axis=1, mode="clip")
        page = jnp.where(place * page_size < ends[:, None], page, 0)
        token = first[:, None] + jnp.arange(chunk_tokens, dtype=jnp.int32)[None, :]
        if lengths.ndim == 1:
            mask = (token < lengths[:, None])[:, None, :]  # [B, 1, T]
        else:
            mask = token[:, None, :] < lengths[:, :, None]  # [B, K, T]
        keys, values = read(k, page), read(v, page)
        kept = jnp.swapaxes(mask, 1, 2)[..., None]
        values = jnp.where(kept, values, 0)  # 0 × NaN of an unused slot is NaN
        scores = jnp.einsum("bkgd,btkd->bkgt", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(mask[:, :, None, :], scores * scale, -jnp.inf)

        def weigh(weights):
            weights = weights.astype(values.dtype)
            return jnp.einsum(
                "bkgt,btkd->bkgd", weights, values, preferred_element_type=jnp.float32
            )

        return online_softmax.update(state, scores, weigh)

    longest = jnp.maximum(jnp.max(ends - starts), 0)
    n_chunks = (longest + chunk_tokens - 1) // chunk_tokens
    state = online_softmax.initial((n_rows, n_kv_heads, group), head_dim)
    out, lse = online_softmax.finish(lax.fori_loop(0, n_chunks, chunk, state))
    return out.reshape(n_rows, n_heads, head_dim), lse.reshape(n_rows, n_heads)
