"""The specifications, against float64 NumPy."""

from decode_suite import SplitKvDecodeSuite
from merge_append_suites import (
    AddRmsNormSuite,
    AppendSuite,
    MergeSuite,
    RopeAppendSuite,
    StageSuite,
)
from segment_suite import SegmentAttentionSuite


class TestSegmentAttention(SegmentAttentionSuite):
    """``segment_attention`` in XLA."""


class TestSplitKvDecode(SplitKvDecodeSuite):
    """``split_kv_decode`` in XLA."""


class TestMerge(MergeSuite):
    """``merge_partials`` in XLA."""


class TestAppend(AppendSuite):
    """``append_kv`` in XLA."""


class TestStage(StageSuite):
    """``stage_kv`` in XLA."""


class TestRopeAppend(RopeAppendSuite):
    """``rope_append`` in XLA."""


class TestAddRmsNorm(AddRmsNormSuite):
    """``add_rms_norm`` in XLA."""
