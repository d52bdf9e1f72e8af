"""Every kernel lowers for a Hopper GPU, on a machine without one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_suite import HEAD_DIMS

from pallas_kernels.append import triton as append_triton
from pallas_kernels.segment_attention import build_schedule, mosaic
from pallas_kernels.segment_attention import triton as segment_triton
from pallas_kernels.split_kv_decode import triton as decode_triton
from pallas_kernels.stage import triton as stage_triton

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

DIMS = [(2, 4, head_dim, "bfloat16") for head_dim in HEAD_DIMS]
GROUPS = [(1, 1, 64, "bfloat16"), (2, 3, 64, "float16"), (1, 16, 64, "float32")]
HOPPER = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")
)


def lower(call, *args):
    """The program for CUDA, as text."""
    with use_abstract_mesh(HOPPER):
        return jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def arrays(n_kv_heads, group, head_dim, dtype, n_slots=512):
    pool = jax.ShapeDtypeStruct((n_slots, n_kv_heads, head_dim), dtype)
    return jax.ShapeDtypeStruct((20, n_kv_heads * group, head_dim), dtype), pool, pool


def schedule_for(n_kv_heads, group, head_dim, row_tile, diagonals=None):
    return build_schedule(
        np.array([(0, 200, 0, 12), (256, 100, 12, 8)], np.int32),
        n_rows=20,
        n_slots=512,
        n_kv_heads=n_kv_heads,
        group=group,
        row_tile=row_tile,
        kv_tile=128 if head_dim <= 128 else 64,
        n_workers=132,
        diagonals=diagonals,
    )


DIAGONALS = [None, np.array([100, 300])]


@pytest.mark.parametrize("diagonals", DIAGONALS)
@pytest.mark.parametrize("shape", [*DIMS, *GROUPS[:2]])
def test_mosaic_segment_attention_lowers(shape, diagonals):
    n_kv_heads, group, head_dim, _ = shape
    schedule = schedule_for(n_kv_heads, group, head_dim, 64 if group == 1 else 128, diagonals)
    call = functools.partial(mosaic.segment_partials, schedule=schedule, scale=0.1)
    assert "mosaic_gpu" in lower(call, *arrays(*shape))


@pytest.mark.parametrize("diagonals", DIAGONALS)
@pytest.mark.parametrize("shape", [*DIMS, *GROUPS])
def test_triton_segment_attention_lowers(shape, diagonals):
    n_kv_heads, group, head_dim, _ = shape
    schedule = schedule_for(n_kv_heads, group, head_dim, 64, diagonals)
    call = functools.partial(segment_triton.segment_partials, schedule=schedule, scale=0.1)
    assert "triton" in lower(call, *arrays(*shape))


@pytest.mark.parametrize("shape", [*DIMS, *GROUPS])
def test_triton_decode_lowers(shape):
    rows = jax.ShapeDtypeStruct((20,), jnp.int32)
    pages = jax.ShapeDtypeStruct((20, 30), jnp.int32)
    call = functools.partial(
        decode_triton.split_kv_decode, page_size=4, scale=0.1, splits=(2,) * shape[0]
    )
    assert "triton" in lower(call, *arrays(*shape), pages, rows, rows)


def test_a_pool_past_two_gibi_elements_lowers():
    rows = jax.ShapeDtypeStruct((20,), jnp.int32)
    pages = jax.ShapeDtypeStruct((20, 30), jnp.int32)
    call = functools.partial(decode_triton.split_kv_decode, page_size=1, scale=0.1)
    args = arrays(8, 4, 128, "bfloat16", n_slots=(1 << 21) + 8)
    assert "triton" in lower(call, *args, pages, rows, rows)


def test_triton_append_lowers():
    pool = jax.ShapeDtypeStruct((512, 3, 80), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((20, 3, 80), jnp.float32)
    slots = jax.ShapeDtypeStruct((20,), jnp.int32)
    assert "triton" in lower(append_triton.append_kv, pool, pool, new, new, slots)


def test_triton_staging_lowers():
    pool = jax.ShapeDtypeStruct((512, 3, 80), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((20, 3, 80), jnp.bfloat16)
    slots, n = jax.ShapeDtypeStruct((60,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    assert "triton" in lower(stage_triton.stage_kv, pool, pool, new, new, slots, n)
