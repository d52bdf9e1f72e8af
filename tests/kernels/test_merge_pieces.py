"""The merge of a schedule's partials, against float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest

from pallas_kernels.segment_attention import build_schedule
from pallas_kernels.segment_attention.merge_triton import merge_pieces

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


@pytest.mark.parametrize("n_pieces", [1, 8, 9, 20])
def test_partials_of_any_number_become_one_row(n_pieces):
    rng, head_dim, row_tile = np.random.default_rng(0), 64, 64
    empty = build_schedule(
        np.zeros((1, 4), np.int32),
        n_rows=3,
        n_slots=64,
        n_kv_heads=1,
        group=3,
        row_tile=row_tile,
        kv_tile=64,
        n_workers=1,
    )
    outs = rng.standard_normal((n_pieces, row_tile, head_dim), np.float32)
    lses = 5 * rng.standard_normal((n_pieces, row_tile), np.float32)
    counts = np.array([[n_pieces], [0], [max(1, n_pieces // 2)]], np.int32)
    pieces = np.full((3, 1, n_pieces), -1, np.int32)
    expected = []
    for row, (count,) in enumerate(counts):
        pieces[row, 0, :count] = np.arange(count) * row_tile + row * 3
        own = slice(row * 3, row * 3 + 3)
        expected.append(reference.merge(outs[:count, own], lses[:count, own]))
    written = np.zeros((n_pieces, row_tile), bool)
    written[:, :9] = True
    outs[~written], lses[~written] = np.nan, np.nan  # nobody's: may hold anything
    schedule = dataclasses.replace(empty, pieces=pieces, counts=counts)
    interpret = jax.default_backend() != "gpu"
    out, lse = merge_pieces(jnp.asarray(outs), jnp.asarray(lses), schedule, 3, interpret=interpret)
    np.testing.assert_allclose(out[0], expected[0][0], atol=1e-5)
    np.testing.assert_allclose(lse[0], expected[0][1], rtol=1e-5)
    assert (np.asarray(out[1]) == 0).all()
    assert np.isneginf(lse[1]).all()
    np.testing.assert_allclose(out[2], expected[2][0], atol=1e-5)
    np.testing.assert_allclose(lse[2], expected[2][1], rtol=1e-5)
