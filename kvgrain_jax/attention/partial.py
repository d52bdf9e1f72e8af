"""Partial attention: the result over some of the keys, and the merge of several into one."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import merge_partials


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionPartial:
    """Attention of every row and head over one set of keys.

    Attributes:
      out: normalised output, float32; exactly 0 where the set is empty.
      lse: natural log of the sum of exponentials of the scaled scores, float32; exactly ``-inf``
        where the set is empty.
    """

    out: Float[Array, "B H D"]
    lse: Float[Array, "B H"]


def merge(partials: Sequence[AttentionPartial]) -> AttentionPartial:
    """Merge partials over disjoint sets of keys; any of them may be empty (GraniKV Eq. 1)."""
    outs = jnp.stack([partial.out for partial in partials])
    lses = jnp.stack([partial.lse for partial in partials])
    return AttentionPartial(*merge_partials(outs, lses))
