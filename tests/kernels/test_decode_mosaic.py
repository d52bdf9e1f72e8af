"""The Mosaic GPU decode kernel, against the specification."""

import functools

import jax
import jax.numpy as jnp
import pytest
from decode_suite import SplitKvDecodeSuite
from test_gpu_lowering import arrays, lower

from pallas_kernels.split_kv_decode import mosaic

# The partials are merged by a kernel on Pallas's Triton backend.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


# A case takes the interpreter 5 to 10 seconds: these few show rings that come round, masked tiles,
# pages smaller and larger than a tile, heads of their own lengths, empty rows and the merge.
INTERPRETED = (
    "test_page_sizes[1]",
    "test_heads_of_their_own_lengths",
    "test_prefix_partials_are_merged_in[3]",
)


class TestSplitKvDecode(SplitKvDecodeSuite):
    """``split_kv_decode`` in Pallas Mosaic GPU, with race detection."""

    implementation = "mosaic"
    dtype = "bfloat16"
    heads = (8, 1)
    slow_interpreter = True

    @pytest.fixture(autouse=True)
    def _few(self, request):
        if jax.default_backend() != "gpu" and request.node.name not in INTERPRETED:
            pytest.skip("the interpreter is slow; this case runs on a GPU")

    def cannot_run(self, *, dtype, heads, head_dim, page_size, splits) -> bool:
        n_kv_heads, group = heads
        return (
            dtype == "float32"
            or head_dim > 128
            or n_kv_heads * group % 8 != 0
            or page_size * n_kv_heads % 8 != 0
            or len(set(splits or [1])) > 1
        )


@pytest.mark.parametrize(("n_kv_heads", "group"), [(8, 4), (8, 5), (16, 4), (32, 1), (8, 1)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_kernel_lowers(n_kv_heads, group, page_size):
    rows, pages = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((20,), (20, 30)))
    call = functools.partial(
        mosaic.split_kv_decode, page_size=page_size, scale=0.1, splits=(2,) * n_kv_heads
    )
    shapes = arrays(n_kv_heads, group, 128, "bfloat16")
    assert "mosaic_gpu" in lower(call, *shapes, pages, rows, rows)
