"""Head-group decode: KV heads of different lengths, paged in groups of similar length."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.head_group_decode import limits, xla
from pallas_kernels.head_group_decode.work import DecodeWork, make_work
from pallas_kernels.implementation import device_reason, interpreting, select, trace_once
from pallas_kernels.limits import head_refusal
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.split_kv_decode.api import check_splits


def head_group_decode(
    q: Float[Array, "B H D"],
    k: Float[Array, "N M D"],
    v: Float[Array, "N M D"],
    pages: Int[Array, "B Q T"],
    lengths: Int[Array, "B Q M"],
    *,
    members: Int[np.ndarray, "Q M"],
    page_size: int,
    scale: float,
    splits: tuple[int, ...] | None = None,
    work: DecodeWork | None = None,
    order: Int[Array, "B"] | None = None,
    prefix: RowPartials | None = None,
    out_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> tuple[Float[Array, "B H D"], Float[Array, "B H"]]:
    """Attend each head of row ``b`` to the first tokens of its group's page table.

    A slot of the pool holds one token of each of the ``M`` members of one of ``Q`` head groups. The
    groups may span layers: a call computes the members that belong to its layer.

    Args:
      q: queries of one layer. ``H`` is a multiple of its KV heads ``K``.
      k: keys of the whole pool; ``N`` is a multiple of ``page_size``.
      v: values of the whole pool.
      pages: page table of each row and group, int32, as for ``split_kv_decode``.
      lengths: tokens of each member, int32. Members of a group share its pages, which hold the
        longest; a member without tokens gets the empty result.
      members: the KV head of the layer that each member is, or -1 for heads of other layers; each
        KV head once.
      page_size: tokens in a page.
      scale: factor of the scores.
      splits: into how many parts the tokens of each KV head are cut, ``K`` positive integers, for
        the GPU kernels: the ahead-of-time balance. None cuts nothing.
      work: the work list that takes the place of ``splits``, see ``layer_work``: one of run-time
        arrays, so that lists of one size share a compiled program.
      order: the rows in the order in which the GPU kernels start them; see ``split_kv_decode``.
      prefix: partial results of the rows over other keys, merged into the result.
      out_dtype: of the output.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later), ``"mosaic"`` (Hopper: bfloat16 or
        float16, pages of a multiple of 8 tokens) or ``"xla"``.

    Returns:
      ``(out, lse)`` as ``split_kv_decode``.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.
      ValueError: members that are not each KV head once, KV heads that do not divide ``H``, or a
        split table that is not K positive integers or a work list of other sizes.

    Source: Tangram §4.2 (head-group pages) and Algorithm 1 (ahead-of-time split table).
    """
    places = head_places(members)
    n_kv_heads = len(places)
    if q.shape[1] % n_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads cannot share {n_kv_heads} KV heads evenly.")
    check_splits(splits, n_kv_heads)
    if work is not None and work.counts.shape != (q.shape[0], n_kv_heads):
        raise ValueError(
            f"The work list is of {work.counts.shape} rows and KV heads, the queries of "
            f"{(q.shape[0], n_kv_heads)}."
        )
    args = (q, k, v, pages, lengths)
    options = {"page_size": page_size, "scale": scale, "prefix": prefix, "out_dtype": out_dtype}

    def run(kernel):
        own = layer_work(members, splits, n_rows=q.shape[0], n_heads=q.shape[1])
        gpu_options = options | {"order": order, "interpret": interpreting()}
        return trace_once(kernel.decode_work, *args, own if work is None else work, **gpu_options)

    def run_triton():
        from pallas_kernels.head_group_decode import triton

        return run(triton)

    def run_mosaic():
        from pallas_kernels.head_group_decode import mosaic

        return run(mosaic)

    triton_refusal = head_refusal(q, k) or device_reason("triton", least=(8, 0), below=(13, 0))
    mosaic_refusal = limits.mosaic_refuses(
        q, k, group=q.shape[1] // n_kv_heads, page_size=page_size, scale=scale
    ) or device_reason("mosaic", least=(9, 0), below=(10, 0))
    candidates = {
        "triton": (run_triton, triton_refusal),
        "mosaic": (run_mosaic, mosaic_refusal),
        "xla": (lambda: xla.head_group_decode(*args, places, **options), None),
    }
    return select("head_group_decode", implementation, candidates)()


def layer_work(
    members: Int[np.ndarray, "Q M"],
    splits: tuple[int, ...] | None,
    *,
    n_rows: int,
    n_heads: int,
    n_entries: int | None = None,
    width: int | None = None,
) -> DecodeWork:
    """The work list of a layer, for ``head_group_decode``. NumPy, at set-up time.

    Args:
      members: as for ``head_group_decode``.
      splits: as for ``head_group_decode``.
      n_rows: rows of the batch, ``B``.
      n_heads: query heads, ``H``.
      n_entries: programs of each row, at least the sum of the splits, which is what None takes.
      width: parts that a head may have, at least the largest split, which is what None takes.

    Raises:
      ValueError: as ``head_group_decode``, or the splits do not fit the sizes.

    Lists of equal sizes, of any layers, run the same compiled program.
    """
    places = head_places(members)
    table = (1,) * len(places) if splits is None else splits
    return make_work(
        places,
        table,
        n_rows=n_rows,
        group=n_heads // len(places),
        n_entries=n_entries,
        width=width,
    )


def head_places(members: Int[np.ndarray, "Q M"]) -> list[tuple[int, int]]:
    """Group and member position of each KV head.

    Args:
      members: as for ``head_group_decode``.

    Raises:
      ValueError: the members are not ``0 … K - 1``, each once.
    """
    found = np.argwhere(members != -1)
    heads = members[tuple(found.T)]
    order = np.argsort(heads, kind="stable")
    if not len(heads) or not np.array_equal(heads[order], np.arange(len(heads))):
        raise ValueError(
            "members must name each KV head from 0 on once, and -1 elsewhere, not "
            f"{members.tolist()}."
        )
    return [(group, member) for group, member in found[order].tolist()]
