"""Work lists of the GPU kernel: which program reads which part of which KV head of a layer.

Enter where the heads lie and into how many parts each is cut; leave small arrays that the kernel reads
while it runs. They are data, not code: lists of one size, of whatever layers and split tables, run the
same compiled program, so that a model's layers are compiled once. NumPy, at set-up time.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

HEAD, SPLIT, SPLITS, GROUP, MEMBER = range(5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DecodeWork:
    """Programs of every row of the batch, and where the merge finds what they leave.

    Attributes:
      entries: of each program its KV head, which part of the head's tokens, how many parts there
        are, and the head's group and member; int32. A part numbered as many as there are is none.
      places: for each row and KV head its parts among the results of all programs, -1 behind them;
        see ``RowPartials``.
      counts: parts of each row and KV head, int32.
    """

    entries: Int[Array | np.ndarray, "J 5"]
    places: Int[Array | np.ndarray, "B K S"]
    counts: Int[Array | np.ndarray, "B K"]


def make_work(
    places: Sequence[tuple[int, int]],
    splits: Sequence[int],
    *,
    n_rows: int,
    group: int,
    n_entries: int | None = None,
    width: int | None = None,
) -> DecodeWork:
    """Work list of a layer.

    Args:
      places: group and member of each KV head, see ``api.head_places``.
      splits: parts of each KV head, positive.
      n_rows: rows of the batch, ``B``.
      group: query heads of a KV head, ``G``.
      n_entries: programs of a row, ``J``; those that the parts do not need do nothing. As many as
        there are parts where None.
      width: parts that a head may have, ``S``. As many as some head has where None.

    Raises:
      ValueError: the parts need more programs, or a head more parts, than the list shall have.
    """
    cuts = np.array(splits, np.int32)
    head = np.repeat(np.arange(len(cuts), dtype=np.int32), cuts)
    split = np.arange(len(head), dtype=np.int32) - (np.cumsum(cuts) - cuts)[head]
    table = np.column_stack([head, split, cuts[head], np.array(places, np.int32)[head]])
    # Heads whose tokens lie in one slot start together: the second finds its lines on their way.
    table = table[np.lexsort((table[:, MEMBER], table[:, SPLIT], table[:, GROUP]))]
    n_entries = len(table) if n_entries is None else n_entries
    width = int(cuts.max()) if width is None else width
    if len(table) > n_entries or cuts.max() > width:
        raise ValueError(
            f"Splits {tuple(splits)} do not fit a work list of {n_entries} programs a row and "
            f"{width} parts a head."
        )
    entries = np.empty((n_entries, table.shape[1]), np.int32)
    entries[: len(table)] = table
    entries[len(table) :] = (0, cuts[0], cuts[0], *places[0])
    row = np.arange(n_rows, dtype=np.int32)
    found = np.full((n_rows, len(cuts), width), -1, np.int32)
    part = np.arange(len(table), dtype=np.int32)
    found[:, table[:, HEAD], table[:, SPLIT]] = (part * n_rows + row[:, None]) * group
    return DecodeWork(entries, found, np.broadcast_to(cuts, (n_rows, len(cuts))).copy())
