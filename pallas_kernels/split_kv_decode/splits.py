"""Parts into which the GPU kernels cut rows: how many, and their results as row partials."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.row_partials import RowPartials

LEAST_SPLIT_TOKENS = 64  # a part of fewer tokens costs more to merge than it saves
# Where rows may be so long, few of them may have to fill the device, however many rows there are.
LONG_TOKENS, LONG_PART_TOKENS, MOST_LONG_PARTS = 32_768, 4096, 16


def even_splits(n_programs, n_tokens):
    """Parts of each row where no table says.

    Enough for two programs a multiprocessor, and of long rows so many that one which is alone in
    its batch does not wait for one program.

    Args:
      n_programs: of all rows, if none is cut.
      n_tokens: of the longest row that there may be.
    """
    device = jax.local_devices()[0]
    wanted = 2 * device.core_count if device.platform == "gpu" else 1
    parts = -(-wanted // n_programs)
    if n_tokens >= LONG_TOKENS:
        parts = max(parts, min(MOST_LONG_PARTS, n_tokens // LONG_PART_TOKENS))
    return max(1, min(parts, n_tokens // LEAST_SPLIT_TOKENS))


def split_partials(outs, lses, splits, group) -> RowPartials:
    """Parts of rows, of which each KV head has its own number, as row partials.

    Args:
      outs: ``[S, B, R, D]`` float32, ``R`` at least ``H``.
      lses: ``[S, B, R]`` float32.
      splits: parts of each KV head, at most ``S``.
      group: ``G``.
    """
    n_splits, n_rows, width, head_dim = outs.shape
    row, head, split = np.ogrid[:n_rows, : len(splits), :n_splits]
    places = (split * n_rows + row) * width + head * group
    counts = np.broadcast_to(np.array(splits, np.int32), (n_rows, len(splits)))
    places = np.where(split < counts[..., None], places, -1).astype(np.int32)
    return RowPartials(
        outs.reshape(-1, head_dim), lses.reshape(-1), jnp.asarray(places), jnp.asarray(counts)
    )
