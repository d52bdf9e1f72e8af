"""Schedules made on the device: the GPU kernels, interpreted, against the specification in XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax.attention.plan import KernelShape
from kvgrain_jax.budgets import ragged
from pallas_kernels import merge_row_partials
from pallas_kernels.implementation import interpreted, override

HEAD_DIM, WORKERS, SLOTS = 16, 5, 640
MERGE = jax.jit(merge_row_partials, static_argnames=("n_heads", "implementation"))


def draw(seed: int, *shape: int, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def attend(lengths, work, q, k, v, *, implementation: str, causal: bool = False):
    """Output and log-sum-exp of the work of a layer."""

    @jax.jit
    def program(q, k, v, work):
        return ragged.attend_runs(q, k, v, work, n_kv_heads=len(lengths), causal=causal)

    with interpreted(), override(implementation):
        part = program(q, k, v, work)
    return MERGE([part], n_heads=q.shape[1], implementation="xla")


def work_of(lengths, *, group: int, n_rows: int, starts=None):
    """Work of the second of two layers; the first has the lengths the other way round."""
    kernels = KernelShape(1, group, HEAD_DIM, WORKERS)
    lengths = jnp.asarray(lengths, jnp.int32)
    if starts is None:
        starts = np.arange(lengths.size) * (SLOTS // lengths.size)
    starts = jnp.asarray(starts, jnp.int32)
    sizes = {"n_rows": n_rows, "n_slots": SLOTS, "most_keys": SLOTS // 2, "kernels": kernels}
    make = jax.jit(partial(ragged.run_work, **sizes))
    return ragged.of_layer(
        make(jnp.stack([starts, starts]), jnp.stack([lengths[::-1], lengths])), 1
    )


def check_both(lengths, work, q, k, v, *, implementation: str, tolerance: float = 2e-5, **options):
    expected = attend(lengths, work, q, k, v, implementation="xla", **options)
    found = attend(lengths, work, q, k, v, implementation=implementation, **options)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    return found


@pytest.mark.parametrize(
    ("lengths", "group", "n_rows"),
    [
        pytest.param([300, 41, 0, 128], 3, 50, id="heads of different lengths, several tiles"),
        pytest.param([320, 1], 7, 33, id="one head has nearly everything"),
        pytest.param([0], 1, 9, id="nothing"),
    ],
)
def test_schedule_covers_every_key_of_every_row_once(lengths, group, n_rows):
    q = draw(1, n_rows, group * len(lengths), HEAD_DIM)
    k, v = draw(2, SLOTS, HEAD_DIM), draw(3, SLOTS, HEAD_DIM)
    work = work_of(lengths, group=group, n_rows=n_rows)
    check_both(lengths, work, q, k, v, implementation="triton")


def test_runs_may_begin_anywhere_and_the_hopper_kernel_reads_them_too():
    lengths, starts = [130, 77], [3, 200]
    q = draw(1, 20, 4, HEAD_DIM, dtype=jnp.bfloat16)
    k, v = (draw(i, SLOTS, HEAD_DIM, dtype=jnp.bfloat16) for i in (2, 3))
    work = work_of(lengths, group=2, n_rows=20, starts=starts)
    check_both(lengths, work, q, k, v, implementation="mosaic", tolerance=2e-2)


def test_work_is_cut_into_equal_parts():
    schedule = work_of([320, 64], group=4, n_rows=100).work.schedule
    assert schedule is not None
    steps = np.asarray(schedule.items)[:, 3]
    starts = np.asarray(schedule.worker_starts)
    loads = np.add.reduceat(np.append(steps, 0), starts[:-1])
    # Four row tiles of a head: three key tiles of 128 each, and one each.
    assert steps.sum() == 4 * 3 + 4 * 1
    assert loads.max() == -(-steps.sum() // WORKERS)


@pytest.mark.parametrize("n_tokens", [16, 132])
def test_tokens_of_a_chunk_see_themselves_and_those_before(n_tokens):
    group, lengths = 2, [n_tokens, n_tokens]
    kernels = KernelShape(1, group, HEAD_DIM, WORKERS)
    q = draw(1, n_tokens, group * 2, HEAD_DIM)
    k, v = draw(2, 2, n_tokens, HEAD_DIM), draw(3, 2, n_tokens, HEAD_DIM)
    work = ragged.own_work(2, n_tokens, kernels=kernels)
    assert (work.work.schedule is not None) == (2 * n_tokens >= kernels.kv_tile)
    implementation = "triton" if work.work.schedule else "xla"
    options = {"implementation": implementation, "causal": True}
    out, _ = check_both(lengths, work, q, k, v, **options)
    first = np.asarray(out)[0].reshape(2, group, HEAD_DIM)
    np.testing.assert_allclose(first, np.asarray(v)[:, :1].repeat(group, 1), rtol=1e-5, atol=1e-6)
