"""The kernel benchmark's arithmetic, and that its cases compute what they claim to time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_cases, kernel_picture, kernels
from experiments.kernel_timing import UNROLL, Ceilings, compile_loop
from kvgrain_jax.errors import ConfigError
from pallas_kernels.implementation import interpreted

CEILINGS = Ceilings(matmul=1e12, copy=1e9, read=2e9)
SHAPE = kernel_cases.HeadShape(n_kv_heads=2, group=2, head_dim=64)


def test_the_roofline_is_the_slower_of_arithmetic_and_traffic():
    assert CEILINGS.floor(5e6, 1e3) == pytest.approx(5.0)
    assert CEILINGS.floor(1e6, 8e3) == pytest.approx(4.0)


def test_flops_and_bytes_of_a_prefix_are_counted():
    case = kernel_cases.prefix_case("p", SHAPE, [(4, 100), (2, 60)], tiles=(64, 64))
    assert case.flops == 4 * (4 * 100 + 2 * 60) * 4 * 64
    assert case.n_bytes == 2 * 160 * 2 * 64 * 2


def test_implementations_of_a_prefix_agree():
    case = kernel_cases.prefix_case(
        "p", SHAPE, [(3, 70)], rotate=2, tiles=(64, 64), implementations=("triton", "xla")
    )
    for turn in range(2):
        with interpreted():
            (out, lse), (expected, expected_lse) = (
                step(turn, *case.args) for step in case.steps.values()
            )
        np.testing.assert_allclose(out, expected, atol=1e-2)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-2)


def test_every_run_of_a_loop_is_run():
    step = jax.jit(lambda turn, x: x + turn, static_argnums=0)
    loop = compile_loop(step, (jnp.zeros(3),), runs=2 * UNROLL, in_place=True, n_turns=4)
    np.testing.assert_array_equal(loop.call(*loop.args), np.full(3, 2 * (0 + 1 + 2 + 3) * 2))


def test_lengths_keep_to_their_bounds_and_sum():
    lengths = kernels._with_sum(np.array([1, 511, 300, 20]), 1000)
    assert lengths.sum() == 1000
    assert lengths.min() >= 1
    assert lengths.max() <= 511


def test_a_row_says_whether_the_bar_was_met():
    case = kernel_cases.Case("c", (), {}, flops=10**9, n_bytes=10, bar=("matmul", 0.5))

    class Loop:
        def microseconds(self, repeats):
            return 2100.0

        def kernels(self):
            return [("kernel", 1900.0)]

    row = kernels.measure(case, "mosaic", Loop(), CEILINGS)  # type: ignore[arg-type]
    assert row["bar_us"] == pytest.approx(2000.0)
    assert (row["met"], row["device_met"]) == (False, True)
    assert "in kernels" in kernels.cells(row)


def test_a_kernel_that_fails_is_a_row_with_its_error():
    case = kernel_cases.Case("c", (), {}, flops=1, n_bytes=1)
    row = kernels.measure(case, "mosaic", RuntimeError("too large"), CEILINGS)
    assert row["error"] == "RuntimeError: too large"
    assert len(kernels.cells(row)) == len(kernels.COLUMNS)


def test_the_roofline_is_drawn(tmp_path):
    row = {"case": "c", "implementation": "mosaic", "us": 1.0, "tflops": 0.5, "tb_s": 0.1}
    kernel_picture.roofline([row], CEILINGS, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what holds without a GPU")
def test_without_a_gpu_the_benchmark_says_so():
    with pytest.raises(ConfigError, match="JAX sees no GPU"):
        kernels.main()
