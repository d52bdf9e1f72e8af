"""The Pallas Mosaic GPU kernels, against the specifications."""

import pytest
from segment_suite import SegmentAttentionSuite

# The partials are merged by a kernel on Pallas's Triton backend.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


class TestSegmentAttention(SegmentAttentionSuite):
    """``segment_attention`` in Pallas Mosaic GPU, with one compute warpgroup."""

    implementation = "mosaic"
    dtype = "bfloat16"
    slow_interpreter = True

    def refuses(self, *, dtype, slots=None, row_positions=None):
        return dtype == "float32" or slots is not None or row_positions is not None


class TestWideSegmentAttention(TestSegmentAttention):
    """The same with two compute warpgroups, which take turns."""

    slow_interpreter = True
    schedule_tiles = (128, 128)
