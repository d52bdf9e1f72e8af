"""The kernel benchmark's arithmetic, and that its cases compute what they claim to time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_cases, kernel_picture, kernel_sweep, kernels, prefill_cases
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


def test_the_whole_attention_is_that_of_prefix_and_suffix():
    case = kernel_cases.whole_case("w", SHAPE, 3, 70, 9, prefix_kernel="triton")
    with interpreted():
        out, lse = case.steps["triton+triton"](0, *case.args)
    q, k, v, _, suffix_k, suffix_v, pages, *_ = case.args
    for row in range(3):
        keys, values = (
            jnp.concatenate([prefix[:70], own[pages[row]]]).astype(jnp.float32)
            for prefix, own in ((k, suffix_k), (v, suffix_v))
        )
        scores = jnp.einsum("kgd,tkd->kgt", q[row].astype(jnp.float32).reshape(2, 2, 64), keys) / 8
        expected = jnp.einsum("kgt,tkd->kgd", jax.nn.softmax(scores), values).reshape(4, 64)
        np.testing.assert_allclose(out[row].astype(jnp.float32), expected, atol=2e-2)
        np.testing.assert_allclose(
            lse[row], jax.nn.logsumexp(scores, axis=-1).reshape(4), atol=1e-2
        )
    assert out.dtype == q.dtype


@pytest.mark.slow
def test_a_chunk_reads_copied_earlier_tokens_as_the_specifications_read_gathered_ones():
    case = prefill_cases.chunk_case("c", kernel_cases.HeadShape(1, 2, 64), 24, 8)
    with interpreted():
        copied = case.steps["copied"](0, *case.args)
    expected = case.steps["gathered"](0, *case.args)
    assert copied.shape == (8, 2, 64)
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (copied, expected)), atol=2e-2)
    assert case.flops == 4 * (8 * 24 + 36) * 2 * 64


def test_the_order_of_rows_is_no_part_of_the_work():
    lengths = np.array([3, 70, 20])
    for ordered in (False, True):
        case = kernel_cases.suffix_case("s", SHAPE, lengths, ordered=ordered)
        assert case.flops == 4 * 93 * 4 * 64
    assert case.args[-1].tolist() == [1, 2, 0]


def test_every_run_of_a_loop_is_run():
    step = jax.jit(lambda turn, x: x + turn, static_argnums=0)
    loop = compile_loop(step, (jnp.zeros(3),), runs=2 * UNROLL, in_place=True, n_turns=4)
    np.testing.assert_array_equal(loop.call(*loop.args), np.full(3, UNROLL // 2 * (0 + 1 + 2 + 3)))


def test_lengths_keep_to_their_bounds_and_sum():
    lengths = kernel_sweep.with_sum(np.array([1, 511, 300, 20]), 1000)
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


def test_a_bar_may_be_a_multiple_of_another_cases_time():
    case = kernel_cases.Case("c", (), {}, flops=1, n_bytes=1, bar=("even", 1.1))
    rows = [{"case": "even", "us": 80.0}, {"case": "even", "us": 70.0}, {"case": "d", "us": 1.0}]
    assert kernels._limit(case, CEILINGS, rows) == pytest.approx(77.0)
    assert kernels._limit(case, CEILINGS, rows[2:]) is None


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
