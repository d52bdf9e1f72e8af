"""Merge in XLA: the specification."""

import jax.numpy as jnp


def merge_partials(outs, lses):  # [P, B, H, D], [P, B, H]
    """See ``api.merge_partials``."""
    top = jnp.max(lses, axis=0)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - finite_top[None])
    total = jnp.sum(weights, axis=0)
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    out = jnp.sum(outs * weights[..., None], axis=0) / divisor[..., None]
    return out, jnp.where(empty, -jnp.inf, top + jnp.log(divisor))


def merge_row_partials(parts, *, n_heads, out_dtype):  # parts: RowPartials
    """See ``api.merge_row_partials``."""
    outs, lses = zip(*(gather_partials(part, n_heads) for part in parts), strict=True)
    out, lse = merge_partials(jnp.concatenate(outs), jnp.concatenate(lses))
    return out.astype(out_dtype), lse


def merge_with(out, lse, prefix, out_dtype):  # [B, H, D], [B, H], RowPartials or None
    """A row's own result merged with its partials over other keys."""
    if prefix is not None:
        outs, lses = gather_partials(prefix, lse.shape[1])
        out, lse = merge_partials(
            jnp.concatenate([out[None], outs]), jnp.concatenate([lse[None], lses])
        )
    return out.astype(out_dtype), lse


def gather_partials(part, n_heads):
    """One ``RowPartials`` as ``[S, B, H, D]`` and ``[S, B, H]``, empty where a row has fewer."""
    n_rows, n_kv_heads, n_places = part.places.shape
    member = jnp.arange(n_heads // n_kv_heads, dtype=jnp.int32)
    place = part.places.transpose(2, 0, 1)[..., None]  # [S, B, K, 1]
    present = place >= 0
    index = jnp.where(present, place + member[None, None, None, :], 0)
    lses = jnp.where(present, part.lses[index], -jnp.inf)
    outs = jnp.where(present[..., None], part.outs[index], 0.0)
    shape = (n_places, n_rows, n_heads)
    return outs.reshape(*shape, part.outs.shape[-1]), lses.reshape(shape)
