"""The Pallas Triton kernels, against the specifications."""

import pytest
from decode_suite import LongestFirstSuite, SplitKvDecodeSuite
from merge_append_suites import (
    AddRmsNormSuite,
    AppendSuite,
    RopeAppendSuite,
    RowMergeSuite,
    StageSuite,
)
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


class TestLongestFirst(LongestFirstSuite):
    """``longest_first``, whose order only this kernel follows."""


class TestRowMerge(RowMergeSuite):
    """``merge_row_partials`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True


class TestAppend(AppendSuite):
    """``append_kv`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True


class TestStage(StageSuite):
    """``stage_kv`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True


class TestRopeAppend(RopeAppendSuite):
    """``rope_append`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True


class TestAddRmsNorm(AddRmsNormSuite):
    """``add_rms_norm`` in Pallas Triton."""

    implementation = "triton"
