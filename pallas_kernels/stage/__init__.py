"""Laying scattered keys and values side by side."""

from pallas_kernels.stage.api import stage_kv as stage_kv
