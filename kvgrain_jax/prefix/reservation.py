"""What one running request holds of the pools."""

import dataclasses

import numpy as np

from kvgrain_jax.prefix.node import Node, Piece


@dataclasses.dataclass(eq=False)
class Reservation:
    """What one request holds. Only the prefix cache writes its fields.

    Attributes:
      prompt: token ids.
      declared: leading tokens declared to be a shared prefix, in whole pages.
      node: lock on the part of the context that the index owns: tokens ``[0, node.end)``.
      cached: prompt tokens that were in the index at admission.
      slab: HOT slab of the prompt that is not the index's (yet), if any.
      run: declared tokens that lie in consecutive COLD pages because HOT had no room, if any.
      pages: page table of the prompt, int32.
      max_pages: pages of the whole context if the request generates all it may.
      promoted: nodes that this admission moved to HOT; running requests must use their new pages.
      committed: whether the prompt's full pages are the index's.
    """

    prompt: np.ndarray
    declared: int
    node: Node
    cached: int
    slab: Piece | None
    run: Piece | None
    pages: np.ndarray
    max_pages: int
    promoted: tuple[Node, ...] = ()
    committed: bool = False
