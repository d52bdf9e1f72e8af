"""Merge of partial attention results."""

from pallas_kernels.merge.api import merge_partials as merge_partials
