"""Attention of each row to its own pages."""

from pallas_kernels.split_kv_decode.api import longest_first as longest_first
from pallas_kernels.split_kv_decode.api import split_kv_decode as split_kv_decode
