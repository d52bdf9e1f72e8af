"""Head-group decode: KV heads of different lengths, paged in groups of similar length."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.head_group_decode import xla
from pallas_kernels.implementation import device_reason, interpreting, select
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
      order: the rows in the order in which the GPU kernels start them; see ``split_kv_decode``.
      prefix: partial results of the rows over other keys, merged into the result.
      out_dtype: of the output.
      implementation: ``"auto"``, ``"triton"`` (sm_80 and later) or ``"xla"``.

    Returns:
      ``(out, lse)`` as ``split_kv_decode``.

    Raises:
      ImplementationError: no such implementation, or one that cannot run here, with the reason.
      ValueError: members that are not each KV head once, KV heads that do not divide ``H``, or a
        split table that is not K positive integers.

    Source: Tangram §4.2 (head-group pages) and Algorithm 1 (ahead-of-time split table).
    """
    places = head_places(members)
    n_kv_heads = len(places)
    if q.shape[1] % n_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads cannot share {n_kv_heads} KV heads evenly.")
    check_splits(splits, n_kv_heads)
    args = (q, k, v, pages, lengths, places)
    options = {"page_size": page_size, "scale": scale, "prefix": prefix, "out_dtype": out_dtype}

    def run_triton():
        from pallas_kernels.head_group_decode import triton

        table = (1,) * n_kv_heads if splits is None else splits
        return triton.head_group_decode(
            *args, splits=table, order=order, interpret=interpreting(), **options
        )

    refused = head_refusal(q, k) or device_reason("triton", least=(8, 0), below=(13, 0))
    candidates = {
        "triton": (run_triton, refused),
        "xla": (lambda: xla.head_group_decode(*args, **options), None),
    }
    return select("head_group_decode", implementation, candidates)()


def head_places(members: Int[np.ndarray, "Q M"]) -> list[tuple[int, int]]:
    """Group and member position of each KV head.

    Args:
      members: as for ``head_group_decode``.

    Raises:
      ValueError: the members are not ``0 … K - 1``, each once.
    """
    places = {int(members[place]): place for place in np.ndindex(members.shape)}
    places.pop(-1, None)
    n_members = int((members != -1).sum())
    if not n_members or sorted(places) != list(range(n_members)):
        raise ValueError(
            "members must name each KV head from 0 on once, and -1 elsewhere, not "
            f"{members.tolist()}."
        )
    return [places[head] for head in range(n_members)]
