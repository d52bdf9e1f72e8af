"""Attention of each row to the pages of its head groups."""

from pallas_kernels.head_group_decode.api import head_group_decode as head_group_decode
