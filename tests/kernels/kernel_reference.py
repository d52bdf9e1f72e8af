"""Attention by its formulas in float64 NumPy: the independent reference of every kernel test.

Nothing here is shared with the library: each row gathers the keys it may see, in a plain loop, and
``softmax(scale · q kᵀ) v`` and its log-sum-exp are written out once, in ``attend``.
"""

import numpy as np


def attend(query, keys, values, scale):
    """One query ``[D]`` over keys and values ``[T, D]``: ``(out [D], lse)``, ``(0, -inf)`` if T = 0."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    if len(keys) == 0:
        return np.zeros(values.shape[-1]), -np.inf
    scores = keys @ query * scale
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ values / weights.sum(), top + np.log(weights.sum())


def attend_slots(q, k, v, visible, scale):
    """Every row ``b`` attends to the pool slots ``visible[b]``: ``([B, H, D], [B, H])``."""
    n_rows, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    out, lse = np.zeros((n_rows, n_heads, head_dim)), np.zeros((n_rows, n_heads))
    for row in range(n_rows):
        for head in range(n_heads):
            keys, values = k[visible[row], head // group], v[visible[row], head // group]
            out[row, head], lse[row, head] = attend(q[row, head], keys, values, scale)
    return out, lse


def segment_slots(n_rows, segments, slots=None, row_positions=None, first_positions=None):
    """The pool slots that each row of ``segment_attention`` sees."""
    visible = [[] for _ in range(n_rows)]
    for index, (base, length, first_row, rows) in enumerate(segments):
        for row in range(first_row, first_row + rows):
            for offset in range(length):
                if first_positions is not None:
                    assert row_positions is not None
                    if first_positions[index] + offset > row_positions[row]:
                        continue
                visible[row].append(base + offset if slots is None else slots[base + offset])
    return [np.array(row, np.int64) for row in visible]


def paged_slots(pages, starts, lengths, page_size):
    """The pool slots that each row of ``split_kv_decode`` sees."""
    return [
        np.array(
            [table[t // page_size] * page_size + t % page_size for t in range(start, end)], np.int64
        )
        for table, start, end in zip(pages, starts, lengths, strict=True)
    ]


def merge(outs, lses):
    """Merge partials ``[P, B, H, D]``, ``[P, B, H]`` by Σ exp(lse) out / Σ exp(lse)."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    for row in np.ndindex(lse.shape):
        present = [p for p in range(len(lses)) if lses[(p, *row)] > -np.inf]
        if present:
            top = max(lses[(p, *row)] for p in present)
            weights = [np.exp(lses[(p, *row)] - top) for p in present]
            parts = [w * outs[(p, *row)] for w, p in zip(weights, present, strict=True)]
            out[row] = sum(parts) / sum(weights)
            lse[row] = top + np.log(sum(weights))
    return out, lse
