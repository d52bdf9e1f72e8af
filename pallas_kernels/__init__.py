"""Attention operations of one decode step, one folder per operation.

Each folder holds the same files: ``api.py`` chooses an implementation, ``xla.py`` is the readable
specification that runs on any device, ``mosaic.py`` is for Hopper GPUs (Pallas Mosaic GPU),
``triton.py`` for sm_80 and later (Pallas Triton), ``tuning/`` holds knobs measured per device. Not
every operation has every file. ``baselines`` are kernels of other systems' design, to compare with.
Nothing here knows the library above: operations take and return plain arrays.
"""

from pallas_kernels.add_rms_norm import add_rms_norm as add_rms_norm
from pallas_kernels.append import append_kv as append_kv
from pallas_kernels.implementation import ImplementationError as ImplementationError
from pallas_kernels.merge import merge_partials as merge_partials
from pallas_kernels.merge import merge_row_partials as merge_row_partials
from pallas_kernels.rope_append import rope_append as rope_append
from pallas_kernels.segment_attention import segment_attention as segment_attention
from pallas_kernels.segment_attention import segment_partials as segment_partials
from pallas_kernels.split_kv_decode import split_kv_decode as split_kv_decode
from pallas_kernels.stage import stage_kv as stage_kv
