"""Attention of runs of rows to contiguous ranges of keys and values."""

from pallas_kernels.segment_attention.api import segment_attention as segment_attention
from pallas_kernels.segment_attention.api import segment_partials as segment_partials
from pallas_kernels.segment_attention.schedule import Capacity as Capacity
from pallas_kernels.segment_attention.schedule import Schedule as Schedule
from pallas_kernels.segment_attention.schedule import build_schedule as build_schedule
from pallas_kernels.segment_attention.schedule import capacity_for as capacity_for
from pallas_kernels.segment_attention.schedule import has_room as has_room
from pallas_kernels.segment_attention.schedule import tiles_for as tiles_for
