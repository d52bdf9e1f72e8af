"""Merge of partial attention results."""

from pallas_kernels.merge.api import merge_partials as merge_partials
from pallas_kernels.merge.api import merge_row_partials as merge_row_partials
