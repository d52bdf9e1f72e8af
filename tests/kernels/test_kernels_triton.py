"""The Pallas Triton kernels, against the specifications."""

import pytest
from decode_suite import SplitKvDecodeSuite
from merge_append_suites import AppendSuite
from segment_suite import SegmentAttentionSuite

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


class TestSegmentAttention(SegmentAttentionSuite):
    """``segment_attention`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True

    def refuses(self, *, dtype, slots=None, row_positions=None):
        return row_positions is not None


class TestSplitKvDecode(SplitKvDecodeSuite):
    """``split_kv_decode`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True


class TestAppend(AppendSuite):
    """``append_kv`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True
