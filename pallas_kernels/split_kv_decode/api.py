"""Split-KV decode: each row attends to its own tokens, scattered over pages of the pool."""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_reason, interpreting, select
from pallas_kernels.limits import head_refusal
from pallas_kernels.split_kv_decode import xla


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
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later) or ``"xla"``.

    Returns:
      ``(out, lse)`` in float32, as ``segment_attention``.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.
      ValueError: a split table that is not K positive integers.

    Source: GraniKV §3.3 (COLD pool); PagedAttention.
    """
    n_kv_heads = k.shape[1]
    if splits is not None and (len(splits) != n_kv_heads or min(splits) < 1):
        raise ValueError(f"splits must be {n_kv_heads} positive integers, not {splits}.")
    ends = lengths if head_lengths is None else head_lengths
    args = (q, k, v, pages, starts, ends)

    def run_triton():
        from pallas_kernels.split_kv_decode import triton

        return triton.split_kv_decode(
            *args,
            page_size=page_size,
            scale=scale,
            splits=splits,
            interpret=interpreting(),
        )

    def run_xla():
        return xla.split_kv_decode(*args, page_size=page_size, scale=scale)

    refused = head_refusal(q, k) or device_reason("triton", least=(8, 0), below=(13, 0))
    candidates = {"triton": (run_triton, refused), "xla": (run_xla, None)}
    return select("split_kv_decode", implementation, candidates)()
