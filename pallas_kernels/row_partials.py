"""Partial results of rows before their merge: what a prefix kernel leaves and a merge takes."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPartials:
    """For each row and KV head a number of partial results, anywhere in one array.

    Head ``k · G + g`` of row ``b`` has the partials ``places[b, k, s] + g`` for
    ``s < counts[b, k]``; elements of ``outs`` and ``lses`` that no place names may hold anything.

    Attributes:
      outs: ``[M, D]`` float32, normalised.
      lses: ``[M]`` float32, natural log-sum-exps, finite or -inf.
      places: ``[B, K, S]`` int32; -1 from ``counts`` on.
      counts: ``[B, K]`` int32.
    """

    outs: Float[Array, "M D"]
    lses: Float[Array, "M"]
    places: Int[Array, "B K S"]
    counts: Int[Array, "B K"]
