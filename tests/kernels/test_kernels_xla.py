"""The specifications, against float64 NumPy."""

from decode_suite import SplitKvDecodeSuite
from merge_append_suites import AppendSuite, MergeSuite
from segment_suite import SegmentAttentionSuite


class TestSegmentAttention(SegmentAttentionSuite):
    """``segment_attention`` in XLA."""


class TestSplitKvDecode(SplitKvDecodeSuite):
    """``split_kv_decode`` in XLA."""


class TestMerge(MergeSuite):
    """``merge_partials`` in XLA."""


class TestAppend(AppendSuite):
    """``append_kv`` in XLA."""
