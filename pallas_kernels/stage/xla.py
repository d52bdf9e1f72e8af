"""Staging in XLA: the specification, two gathers and a choice between them."""

import jax.numpy as jnp


def stage_kv(k, v, new_k, new_v, slots, n):  # [N, K, D] ×2, [T, K, D] ×2, [S], []
    """See ``api.stage_kv``. Behind ``n`` it copies what ``slots`` says there."""
    del n
    n_slots = k.shape[0]
    new = (slots >= n_slots)[:, None, None]

    def copy(pool, rows):
        return jnp.where(
            new,
            rows.at[slots - n_slots].get(mode="clip"),
            pool.at[slots].get(mode="clip"),
        )

    return copy(k, new_k), copy(v, new_v)
