"""The independent baselines compute attention: only then is their time worth comparing."""

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from kernel_suite import TOLERANCE, draw, wide

if jax.default_backend() != "gpu":
    pytest.skip("jax-triton has no interpreter; needs a GPU", allow_module_level=True)
pytest.importorskip("jax_triton")

from pallas_kernels.baselines.two_layouts import attend_layout
from pallas_kernels.baselines.uniform_paged import uniform_paged_decode

SCALE = 0.09


@pytest.mark.parametrize("n_splits", [1, 3])
def test_uniform_paged_decode_attends_to_its_pages(n_splits):
    q, k, v = (
        draw(i, shape, "bfloat16") for i, shape in enumerate([(3, 8, 128), *[(512, 2, 128)] * 2])
    )
    pages = np.random.default_rng(0).permutation(32)[:30].reshape(3, 10)
    lengths = np.array([1, 97, 160])
    out = uniform_paged_decode(
        q,
        k,
        v,
        jnp.asarray(pages, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        scale=SCALE,
        n_splits=n_splits,
    )
    visible = reference.paged_slots(pages, np.zeros(3, int), lengths, 16)
    expected, _ = reference.attend_slots(wide(q), wide(k), wide(v), visible, SCALE)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("requests", [1, 4])
def test_both_layouts_attend_to_their_own_slots(requests):
    q, k, v = (
        draw(i, shape, "bfloat16") for i, shape in enumerate([(8, 8, 128), *[(800, 2, 128)] * 2])
    )
    bases = np.arange(8 // requests) * 100
    out = attend_layout(
        q, k, v, jnp.asarray(bases, jnp.int32), length=90, requests=requests, scale=SCALE
    )
    visible = [np.arange(90) + bases[row // requests] for row in range(8)]
    expected, _ = reference.attend_slots(wide(q), wide(k), wide(v), visible, SCALE)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE["bfloat16"])
