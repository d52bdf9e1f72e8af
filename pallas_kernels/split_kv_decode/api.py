"""Split-KV decode: each row attends to its own tokens, scattered over pages of the pool."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_reason, interpreting, select, trace_once
from pallas_kernels.limits import head_refusal
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.split_kv_decode import limits, xla


def split_kv_decode(
    q: Float[Array, "B H D"],
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    pages: Int[Array, "B T"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    page_size: int,
    scale: float,
    head_lengths: Int[Array, "B K"] | None = None,
    splits: tuple[int, ...] | None = None,
    order: Int[Array, "B"] | None = None,
    prefix: RowPartials | None = None,
    out_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> tuple[Float[Array, "B H D"], Float[Array, "B H"]]:
    """Attend row ``b`` to the tokens ``[starts[b], lengths[b])`` of its page table.

    Args:
      q: queries. ``H`` is a multiple of ``K``; head ``h`` reads KV head ``h // (H // K)``.
      k: keys of the whole pool; ``N`` is a multiple of ``page_size``.
      v: values of the whole pool.
      pages: page table, int32. Token ``t`` of row ``b`` lies in slot
        ``pages[b, t // page_size] * page_size + t % page_size``. Entries outside the row's range
        are not used and may hold anything.
      starts: first token of each row, int32, a multiple of ``page_size``.
      lengths: token after the last of each row, int32. A row with ``lengths <= starts`` gets the
        empty result, output 0 and log-sum-exp -inf.
      page_size: tokens in a page.
      scale: factor of the scores.
      head_lengths: token after the last of each row and KV head, int32, where heads differ; it
        takes the place of ``lengths``. Heads share the row's pages, which hold the longest.
      splits: into how many parts the tokens of each KV head are cut, ``K`` positive integers, for
        the GPU kernels. The parts of a row run in parallel and are merged; a part may be empty.
        None cuts rows evenly where there are too few of them to fill the device.
      order: the rows in the order in which the GPU kernels start them, a permutation, int32; see
        ``longest_first``. It changes nothing but the time. None takes them as they come.
      prefix: partial results of the rows over other keys, merged into the result.
      out_dtype: of the output.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later), ``"mosaic"`` (Hopper: bfloat16 or
        float16, ``page_size * K`` a multiple of 8, all heads split alike) or ``"xla"``.

    Returns:
      ``(out, lse)``: the normalised output, and in float32 the natural log of the sum of
      exponentials of the scaled scores, both over the row's tokens and those of ``prefix``.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.
      ValueError: a split table that is not K positive integers.

    Source: GraniKV §3.3 (COLD pool) and Eq. 1 (merge); PagedAttention.
    """
    n_kv_heads = k.shape[1]
    check_splits(splits, n_kv_heads)
    ends = lengths if head_lengths is None else head_lengths
    args = (q, k, v, pages, starts, ends)
    options = {"page_size": page_size, "scale": scale, "prefix": prefix, "out_dtype": out_dtype}

    gpu_options = options | {"splits": splits, "order": order, "interpret": interpreting()}

    def run_triton():
        from pallas_kernels.split_kv_decode import triton

        return trace_once(triton.split_kv_decode, *args, **gpu_options)

    def run_mosaic():
        from pallas_kernels.split_kv_decode import mosaic

        return trace_once(mosaic.split_kv_decode, *args, **gpu_options)

    triton_refusal = head_refusal(q, k) or device_reason("triton", least=(8, 0), below=(13, 0))
    mosaic_refusal = limits.mosaic_refuses(
        q, k, page_size=page_size, scale=scale, splits=splits
    ) or device_reason("mosaic", least=(9, 0), below=(10, 0))
    candidates = {
        "triton": (run_triton, triton_refusal),
        "mosaic": (run_mosaic, mosaic_refusal),
        "xla": (lambda: xla.split_kv_decode(*args, **options), None),
    }
    return select("split_kv_decode", implementation, candidates)()


def longest_first(starts: Int[Array, "B"], lengths: Int[Array, "B *K"]) -> Int[Array, "B"]:
    """Rows by falling length: the order in which rows of very different lengths end together.

    Args:
      starts: first token of each row.
      lengths: token after the last of each row, or of each row and KV head, whose longest counts.

    Returns:
      A permutation of the rows, int32; rows of one length stay in their order.
    """
    ends = jnp.max(lengths.reshape(lengths.shape[0], -1), axis=1)
    return jnp.argsort(starts - ends, stable=True).astype(jnp.int32)


def check_splits(splits: tuple[int, ...] | None, n_kv_heads: int) -> None:
    """Raise ValueError unless ``splits`` is None or has a positive integer for each KV head."""
    if splits is not None and (len(splits) != n_kv_heads or min(splits) < 1):
        raise ValueError(f"splits must be {n_kv_heads} positive integers, not {splits}.")
