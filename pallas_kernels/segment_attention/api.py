"""Segment attention: many rows share one range of keys and values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_reason, interpreting, select, trace_once
from pallas_kernels.row_partials import RowPartials
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
        turns on the causal mask: a row sees the keys at positions up to its own. GPU kernels need
        a schedule with the diagonals that say the same.
      first_positions: position of the first key of each segment.
      schedule: the same segments' work for the GPU kernels, from ``build_schedule``. Without it
        only ``"xla"`` runs, which in turn does not read it.
      implementation: ``"auto"``, ``"mosaic"`` (Hopper: bfloat16 or float16, contiguous segments),
        ``"triton"`` (sm_80 and later) or ``"xla"``.

    Returns:
      ``(out, lse)`` in float32: the normalised output, and the natural log of the sum of
      exponentials of the scaled scores.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.

    Source: GraniKV §3.5 (dense and cascade backends over the HOT pool); Hydragen.
    """
    result = _run(
        q,
        k,
        v,
        segments,
        work,
        n_work,
        row_tile=row_tile,
        kv_tile=kv_tile,
        scale=scale,
        slots=slots,
        row_positions=row_positions,
        first_positions=first_positions,
        schedule=schedule,
        implementation=implementation,
    )
    if isinstance(result, RowPartials):
        from pallas_kernels.merge import triton

        return trace_once(
            triton.merge_row_partials,
            [result],
            n_heads=q.shape[1],
            out_dtype=jnp.float32,
            interpret=interpreting(),
        )
    return result


def segment_partials(
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
) -> RowPartials:
    """The partial results of ``segment_attention``, for another operation to merge.

    Takes the same arguments, raises the same errors and is recorded under the same name.

    Returns:
      What each row is made of: on a GPU one partial for each piece of its keys, with ``"xla"`` one
      for each row. Merged they are what ``segment_attention`` returns.
    """
    result = _run(
        q,
        k,
        v,
        segments,
        work,
        n_work,
        row_tile=row_tile,
        kv_tile=kv_tile,
        scale=scale,
        slots=slots,
        row_positions=row_positions,
        first_positions=first_positions,
        schedule=schedule,
        implementation=implementation,
    )
    return result if isinstance(result, RowPartials) else _whole_rows(*result, k.shape[1])


def _whole_rows(out: jax.Array, lse: jax.Array, n_kv_heads: int) -> RowPartials:
    """One partial for each row and head."""
    n_rows, n_heads, head_dim = out.shape
    heads = jnp.arange(n_rows * n_kv_heads, dtype=jnp.int32) * (n_heads // n_kv_heads)
    return RowPartials(
        outs=out.reshape(-1, head_dim),
        lses=lse.reshape(-1),
        places=heads.reshape(n_rows, n_kv_heads, 1),
        counts=jnp.ones((n_rows, n_kv_heads), jnp.int32),
    )


def _run(
    q,
    k,
    v,
    *segments_and_work,
    scale,
    slots,
    row_positions,
    schedule,
    implementation,
    **xla_options,
) -> RowPartials | tuple[jax.Array, jax.Array]:
    """Partial results from a kernel, or the result from XLA."""
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

        return trace_once(
            mosaic.segment_partials, q, k, v, schedule, scale=scale, interpret=interpreting()
        )

    def run_triton():
        from pallas_kernels.segment_attention import triton

        return trace_once(
            triton.segment_partials,
            q,
            k,
            v,
            schedule,
            scale=scale,
            slots=slots,
            interpret=interpreting(),
        )

    def run_xla():
        return xla.segment_attention(
            q, k, v, *segments_and_work, scale=scale, **options, **xla_options
        )

    candidates = {
        "mosaic": (run_mosaic, refused["mosaic"]),
        "triton": (run_triton, refused["triton"]),
        "xla": (run_xla, None),
    }
    return select("segment_attention", implementation, candidates)()
