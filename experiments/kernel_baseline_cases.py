"""Work of the baselines that share no code with our kernels: enters shapes, leaves timeable cases.

They need jax-triton and a CUDA device.
"""

import jax.numpy as jnp
import numpy as np

from experiments.kernel_cases import Case, HeadShape
from pallas_kernels import split_kv_decode
from pallas_kernels.baselines import two_layouts, uniform_paged

PAGE = 16


def uniform_case(
    name: str, shape: HeadShape, n_rows: int, prefix: int, suffix: int, **more
) -> Case:
    """Decode through 16-token pages: the prefix's pages are shared, each row reads them itself."""
    rng, dtype = np.random.default_rng(0), jnp.bfloat16
    shared, own = prefix // PAGE, suffix // PAGE
    order = rng.permutation(shared + n_rows * own)
    pages = np.concatenate(
        [np.broadcast_to(order[:shared], (n_rows, shared)), order[shared:].reshape(n_rows, own)], 1
    )
    k, v = shape.pools(len(order) * PAGE, dtype)
    scale = shape.head_dim**-0.5

    def baseline(_, q, k, v, pages, starts, lengths):
        return uniform_paged.uniform_paged_decode(q, k, v, pages, lengths, scale=scale)

    def ours(_, q, k, v, pages, starts, lengths):
        return split_kv_decode(q, k, v, pages, starts, lengths, page_size=PAGE, scale=scale)

    return Case(
        name,
        (
            shape.queries(n_rows, dtype),
            k,
            v,
            jnp.asarray(pages, jnp.int32),
            jnp.zeros(n_rows, jnp.int32),
            jnp.full(n_rows, prefix + suffix, jnp.int32),
        ),
        {"jax-triton": baseline, "triton": ours},
        shape.flops(n_rows * (prefix + suffix)),
        shape.kv_bytes(prefix + n_rows * suffix, dtype),
        **more,
    )


def layout_case(name: str, shape: HeadShape, n_rows: int, prefix: int, *, shared: bool) -> Case:
    """One layout of the two-layout microbenchmark (GraniKV, Table 5)."""
    dtype, tile = jnp.bfloat16, 64
    requests = tile // shape.group if shared else 1
    n_tiles = n_rows // requests
    k, v = shape.pools(prefix if shared else prefix * n_rows, dtype)
    bases = np.zeros(n_tiles) if shared else np.arange(n_tiles) * prefix
    scale = shape.head_dim**-0.5

    def run(_, q, k, v, bases):
        return two_layouts.attend_layout(
            q, k, v, bases, length=prefix, requests=requests, scale=scale, tile=tile
        )

    return Case(
        name,
        (shape.queries(n_rows, dtype), k, v, jnp.asarray(bases, jnp.int32)),
        {"jax-triton": run},
        shape.flops(n_rows * prefix),
        shape.kv_bytes(prefix if shared else prefix * n_rows, dtype),
    )
