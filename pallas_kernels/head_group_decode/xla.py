"""Head-group decode in XLA: the specification, ``split_kv_decode`` of one KV head, for each."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.merge import xla as merge
from pallas_kernels.split_kv_decode import xla


def head_group_decode(
    q,  # [B, H, D]
    k,  # [N, M, D]
    v,  # [N, M, D]
    pages,  # [B, Q, T]
    lengths,  # [B, Q, M]
    places,  # K × (group, member)
    *,
    page_size,
    scale,
    prefix=None,
    out_dtype=jnp.float32,
):
    """See ``api.head_group_decode``."""
    n_rows, n_heads, head_dim = q.shape
    groups, members = np.array(places, np.int32).T
    starts = jnp.zeros(n_rows, jnp.int32)

    def one_head(q, pages, lengths, member):
        return xla.decode_tokens(
            q, k, v, pages, starts, lengths, page_size=page_size, scale=scale, column=member
        )

    out, lse = jax.vmap(one_head, in_axes=(1, 1, 1, 0), out_axes=1)(
        q.reshape(n_rows, len(places), -1, head_dim),
        pages[:, groups],
        lengths[:, groups, members],
        jnp.asarray(members),
    )
    return merge.merge_with(
        out.reshape(n_rows, n_heads, head_dim), lse.reshape(n_rows, n_heads), prefix, out_dtype
    )
