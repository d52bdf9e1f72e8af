"""Decode attention over the pools with your own queries, keys and values; no engine, no model.

Run it with ``python -m examples.decode_attention``.
"""

import jax
import jax.numpy as jnp

import kvgrain_jax as kg

ROWS, PREFIX, SUFFIX, KV_HEADS, HEADS, HEAD_DIM = 8, 1000, 32, 2, 8, 64


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    k_prefix, v_prefix = jax.random.normal(keys[0], (2, PREFIX, KV_HEADS, HEAD_DIM))
    k_suffix, v_suffix = jax.random.normal(keys[1], (2, ROWS * SUFFIX, KV_HEADS, HEAD_DIM))
    q = jax.random.normal(keys[2], (ROWS, HEADS, HEAD_DIM))

    geometry = kg.PoolGeometry.from_tokens(
        4096, n_layers=1, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, hot_fraction=0.5
    )
    pools, kv = kg.lending.init(geometry), kg.buffers.init(geometry)
    _, base = kg.hot.allocate(pools.hot, PREFIX)  # one slab for the shared prefix
    _, pages, _ = kg.cold.allocate(pools.cold, jnp.ones(ROWS * SUFFIX, bool))  # a page per token
    kv = kg.buffers.write(kv, 0, base + jnp.arange(PREFIX, dtype=jnp.int32), k_prefix, v_prefix)
    kv = kg.buffers.write(kv, 0, pages, k_suffix, v_suffix)

    slab = kg.Segment(int(base), PREFIX, first_row=0, n_rows=ROWS)
    plan = kg.make_plan([slab], n_rows=ROWS, n_slots=geometry.n_slots, max_segments=4)
    table = jnp.concatenate(  # page table of each row's whole context
        [jnp.tile(base + jnp.arange(PREFIX, dtype=jnp.int32), (ROWS, 1)), pages.reshape(ROWS, -1)],
        axis=1,
    )
    lengths = jnp.full(ROWS, PREFIX + SUFFIX, jnp.int32)
    attend = jax.jit(kg.decode_attention, static_argnames=("backend", "page_size"))
    dense = attend(q, kv.k[0], kv.v[0], plan, table, lengths, backend="dense", page_size=1)
    paged = attend(q, kv.k[0], kv.v[0], plan, table, lengths, backend="paged", page_size=1)
    print(f"output {dense.out.shape}, log-sum-exp {dense.lse.shape}")
    print(f"largest difference of dense and paged: {jnp.max(jnp.abs(dense.out - paged.out)):.1e}")


if __name__ == "__main__":
    main()
