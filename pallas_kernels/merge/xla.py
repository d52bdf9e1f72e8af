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
