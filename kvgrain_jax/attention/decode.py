"""Attention of one decode step: four backends over the same buffers, equal but for rounding.

    context of a row:   [ shared prefix: segments of the plan ][ suffix: pages of its table ]
                        0                              starts[b]                     lengths[b]

| backend     | shared prefix                                   | suffix            |
| ----------- | ----------------------------------------------- | ----------------- |
| `dense`     | once a step, contiguous, wide row tiles         | row's own pages   |
| `cascade`   | once a step, contiguous, narrow row tiles       | row's own pages   |
| `cascade16` | once a step, gathered through row 0's pages     | row's own pages   |
| `paged`     | each row for itself, through its pages          | row's own pages   |

The page table of a row names the pages of its whole context, HOT ones included, so any backend can
serve any row. Source: GraniKV §3.5.
"""

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from kvgrain_jax.attention.partial import AttentionPartial
from kvgrain_jax.attention.plan import DecodePlan
from kvgrain_jax.errors import ConfigError
from pallas_kernels import segment_partials, split_kv_decode
from pallas_kernels.split_kv_decode import longest_first

BACKENDS = ("dense", "cascade", "paged", "cascade16")


def decode_attention(
    q: Float[Array, "B H D"],
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    plan: DecodePlan,
    pages: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    *,
    backend: str,
    page_size: int,
    scale: float | None = None,
    order: Int[Array, "B"] | None = None,
    out_dtype: DTypeLike = jnp.float32,
) -> AttentionPartial:
    """Attention of one query of each row to the row's whole context.

    Args:
      q: queries.
      k: keys of one layer.
      v: values of one layer.
      plan: what rows share. For ``cascade16`` its segments count tokens of row 0's page table
        instead of slots. ``paged`` does not look at it.
      pages: page table of each row's context, int32.
      lengths: tokens of each row's context, the query's own included, int32.
      backend: one of ``BACKENDS``.
      page_size: tokens of a page; ``plan.starts`` are multiples of it.
      scale: factor of the scores; ``D ** -0.5`` where None.
      order: in which order the GPU takes the rows, see ``row_order``; as they come where None.
      out_dtype: of the output.

    Returns:
      Output and log-sum-exp of every row and head; ``(0, -inf)`` for a row without context.

    Raises:
      ConfigError: unknown backend.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if backend not in BACKENDS:
        raise ConfigError(f"There is no backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    prefix = None
    if backend != "paged":
        work = plan.dense if backend == "dense" else plan.cascade
        prefix = segment_partials(
            q,
            k,
            v,
            plan.segments,
            work.items,
            work.n_items,
            row_tile=work.tiling.row_tile,
            kv_tile=work.tiling.kv_tile,
            scale=factor,
            slots=page_slots(pages[0], page_size) if backend == "cascade16" else None,
            schedule=work.schedule,
        )
    out, lse = split_kv_decode(
        q,
        k,
        v,
        pages,
        _starts(plan, backend),
        lengths,
        page_size=page_size,
        scale=factor,
        prefix=prefix,
        order=order,
        out_dtype=out_dtype,
    )
    return AttentionPartial(out, lse)


def row_order(plan: DecodePlan, lengths: Int[Array, "B"], *, backend: str) -> Int[Array, "B"]:
    """Rows in the order in which the GPU should take them: by the tokens each reads for itself."""
    return longest_first(_starts(plan, backend), lengths)


def _starts(plan: DecodePlan, backend: str) -> Int[Array, "B"]:
    """Tokens at the front of each row's context that its own pages need not be read for."""
    return jnp.zeros_like(plan.starts) if backend == "paged" else plan.starts


def page_slots(pages: Int[Array, "T"], page_size: int) -> Int[Array, "S"]:
    """Slots of the tokens of pages, ``S = T * page_size``."""
    offsets = jnp.arange(page_size, dtype=pages.dtype)
    return (pages[:, None] * page_size + offsets[None, :]).reshape(-1)
