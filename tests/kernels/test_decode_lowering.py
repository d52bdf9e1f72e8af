"""The decode and merge kernels lower for a Hopper GPU with all their arguments."""

import functools

import jax
import jax.numpy as jnp
import pytest
from test_gpu_lowering import arrays, lower

from pallas_kernels.head_group_decode import triton as head_group_triton
from pallas_kernels.merge import triton as merge_triton
from pallas_kernels.row_partials import RowPartials
from pallas_kernels.split_kv_decode import triton as decode_triton
from pallas_kernels.split_kv_decode.splits import even_splits

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

ROWS = jax.ShapeDtypeStruct((20,), jnp.int32)
SHAPES = [(8, 4, 128, "bfloat16"), (2, 5, 80, "float16"), (1, 16, 256, "float32")]


def operands(n_kv_heads, head_dim, n_places=12):
    """What ``RowPartials`` of 20 rows is made of."""
    return (
        jax.ShapeDtypeStruct((640, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((640,), jnp.float32),
        jax.ShapeDtypeStruct((20, n_kv_heads, n_places), jnp.int32),
        jax.ShapeDtypeStruct((20, n_kv_heads), jnp.int32),
    )


@pytest.mark.parametrize("n_splits", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_with_prefix_partials_lowers(shape, n_splits):
    n_kv_heads, _, head_dim, _ = shape

    def call(q, k, v, pages, starts, lengths, order, *prefix):
        return decode_triton.split_kv_decode(
            *(q, k, v, pages, starts, lengths),
            page_size=1,
            scale=0.1,
            splits=(n_splits,) * n_kv_heads,
            order=order,
            prefix=RowPartials(*prefix),
            out_dtype=q.dtype,
        )

    pages = jax.ShapeDtypeStruct((20, 30), jnp.int32)
    text = lower(call, *arrays(*shape), pages, ROWS, ROWS, ROWS, *operands(n_kv_heads, head_dim))
    assert text.count("@__gpu$xla.gpu.triton") == n_splits


@pytest.mark.parametrize("shape", SHAPES)
def test_merge_of_row_partials_lowers(shape):
    n_kv_heads, group, head_dim, dtype = shape

    def call(*prefix):
        part = RowPartials(*prefix)
        return merge_triton.merge_row_partials(
            [part, part], n_heads=n_kv_heads * group, out_dtype=dtype
        )

    assert "triton" in lower(call, *operands(n_kv_heads, head_dim))


@pytest.mark.parametrize("shape", SHAPES)
def test_head_group_decode_lowers(shape):
    n_kv_heads = shape[0]
    call = functools.partial(
        head_group_triton.head_group_decode,
        places=[(head, 0) for head in range(n_kv_heads)],
        splits=tuple(head % 3 + 1 for head in range(n_kv_heads)),
        page_size=16,
        scale=0.1,
    )
    pages = jax.ShapeDtypeStruct((20, n_kv_heads, 30), jnp.int32)
    lengths = jax.ShapeDtypeStruct((20, n_kv_heads, n_kv_heads), jnp.int32)
    assert "triton" in lower(call, *arrays(*shape), pages, lengths)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="expects no multiprocessors to fill")
@pytest.mark.parametrize(
    ("n_tokens", "parts"), [(64, 1), (32_767, 1), (32_768, 8), (65_536, 16), (131_072, 16)]
)
def test_rows_that_may_be_long_are_cut_however_many_there_are(n_tokens, parts):
    assert even_splits(2048, n_tokens) == parts
