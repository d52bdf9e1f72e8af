"""Work of a prefill chunk that the kernel benchmark measures; see ``experiments.kernel_cases``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_cases import Case, HeadShape, Step, multiprocessors
from kvgrain_jax.attention import (
    ChunkPart,
    HotPiece,
    KernelShape,
    make_prefill_plan,
    prefill_attention,
)

WAYS = ("slab", "copied", "gathered")


def chunk_case(name: str, shape: HeadShape, earlier: int, n_tokens: int, **more: Any) -> Case:
    """Attention of one layer for a chunk of a prompt, ``earlier`` tokens of which are there.

    These lie in a slab, or in scattered pages of one token, which are copied side by side (``copied``)
    or read where they are (``gathered``).
    """
    dtype = jnp.bfloat16
    n_slots = max(128, 2 * (earlier + n_tokens))
    row_tokens = earlier + n_tokens
    q = shape.queries(n_tokens, dtype)
    new_k, new_v = shape.pools(n_tokens, dtype)
    k, v = shape.pools(n_slots, dtype)
    pages = np.random.default_rng(0).permutation(n_slots)[None, :row_tokens].astype(np.int32)
    kernels = KernelShape(shape.n_kv_heads, shape.group, shape.head_dim, multiprocessors())

    def plan(way: str):
        hot = (HotPiece(0, 0, earlier),) if way == "slab" else ()
        return make_prefill_plan(
            [ChunkPart(0, earlier, n_tokens, hot)],
            n_tokens=n_tokens,
            n_rows=1,
            row_tokens=row_tokens,
            n_slots=n_slots,
            max_parts=1,
            max_pieces=1,
            max_staged=row_tokens if way == "copied" else 0,
            kernels=kernels,
        )

    def step(way: str) -> Step:
        def run(_, q, new_k, new_v, k, v, plans, pages):
            return prefill_attention(
                q, new_k, new_v, k, v, plans[way], pages, page_size=1, out_dtype=dtype
            ).out

        return run

    return Case(
        name,
        (q, new_k, new_v, k, v, {way: plan(way) for way in WAYS}, jax.device_put(pages)),
        {way: step(way) for way in WAYS},
        shape.flops(n_tokens * earlier + n_tokens * (n_tokens + 1) // 2),
        shape.kv_bytes(row_tokens, dtype),
        **more,
    )
