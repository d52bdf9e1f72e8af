"""Segment attention: many rows share one range of keys and values."""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_reason, interpreting, select
from pallas_kernels.segment_attention import limits, xla
from pallas_kernels.segment_attention.schedule import Schedule


def segment_attention(
    q: Float[Array, "B H D"],
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    segments: Int[Array, "C 4"],
    work: Int[Array, "W 3"],
    n_work: Int[Array, ""],
    *,
    row_tile: int,
    kv_tile: int,
    scale: float,
    slots: Int[Array, "I"] | None = None,
    row_positions: Int[Array, "B"] | None = None,
    first_positions: Int[Array, "C"] | None = None,
    schedule: Schedule | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B H D"], Float[Array, "B H"]]:
    """Attend every row to the union of the segments that cover it.

    A segment is a range of keys and values and the run of adjacent rows that attends to it. A
    row that lies in several (nested) segments attends to all of them; a row in none gets the
    empty result, output 0 and log-sum-exp -inf.

    Args:
      q: queries. ``H`` is a multiple of ``K``; head ``h`` reads KV head ``h // (H // K)``.
      k: keys of the whole pool.
      v: values of the whole pool.
      segments: ``(base, length, first_row, n_rows)``, int32. The keys of a segment are the slots
        ``[base, base + length)``, or, where ``slots`` is given, ``slots[base : base + length]``.
      work: ``(segment, row offset, kv offset)``, int32: the tiles to compute, each of ``row_tile``
        rows and ``kv_tile`` keys of one segment. See ``kvgrain_jax.attention.plan``.
      n_work: how many entries of ``work`` count.
      row_tile: rows in a tile; at most ``B``.
      kv_tile: keys in a tile; at most ``N`` (``I`` where ``slots`` is given).
      scale: factor of the scores, ``D ** -0.5`` for most models.
      slots: indirection from a segment's index to a pool slot (shared paged prefixes).
      row_positions: position of each row's token in its sequence. With ``first_positions`` it
        turns on the causal mask: a row sees the keys at positions up to its own.
      first_positions: position of the first key of each segment.
      schedule: the same segments' work for the GPU kernels, from ``build_schedule``. Without it
        only ``"xla"`` runs, which in turn does not read it.
      implementation: ``"auto"``, ``"mosaic"`` (Hopper: bfloat16 or float16, contiguous segments),
        ``"triton"`` (sm_80 and later, no causal mask) or ``"xla"``.

    Returns:
      ``(out, lse)`` in float32: the normalised output, and the natural log of the sum of
      exponentials of the scaled scores.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.

    Source: GraniKV §3.5 (dense and cascade backends over the HOT pool); Hydragen.
    """
    options = {"slots": slots, "row_positions": row_positions}
    refused = {
        "mosaic": limits.mosaic_refuses(q, k, schedule, scale=scale, **options)
        or device_reason("mosaic", least=(9, 0), below=(10, 0)),
        "triton": limits.triton_refuses(q, k, schedule, row_positions=row_positions)
        or device_reason("triton", least=(8, 0), below=(13, 0)),
    }

    # A kernel is imported when it runs: Pallas on GPU takes a second to import, and needs absl-py.
    def run_mosaic():
        from pallas_kernels.segment_attention import mosaic

        assert schedule is not None  # refused otherwise
        return mosaic.segment_attention(q, k, v, schedule, scale=scale, interpret=interpreting())

    def run_triton():
        from pallas_kernels.segment_attention import triton

        assert schedule is not None  # refused otherwise
        return triton.segment_attention(
            q, k, v, schedule, scale=scale, slots=slots, interpret=interpreting()
        )

    def run_xla():
        return xla.segment_attention(
            q,
            k,
            v,
            segments,
            work,
            n_work,
            row_tile=row_tile,
            kv_tile=kv_tile,
            scale=scale,
            first_positions=first_positions,
            **options,
        )

    candidates = {
        "mosaic": (run_mosaic, refused["mosaic"]),
        "triton": (run_triton, refused["triton"]),
        "xla": (run_xla, None),
    }
    return select("segment_attention", implementation, candidates)()
