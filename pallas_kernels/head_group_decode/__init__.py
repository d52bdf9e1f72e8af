"""Attention of each row to the pages of its head groups."""

from pallas_kernels.head_group_decode.api import head_group_decode as head_group_decode
from pallas_kernels.head_group_decode.api import layer_work as layer_work
from pallas_kernels.head_group_decode.work import DecodeWork as DecodeWork
