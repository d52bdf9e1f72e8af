"""Position encoding of projected heads, and writing their keys and values into slots."""

from pallas_kernels.rope_append.api import rope_append as rope_append
from pallas_kernels.rope_append.xla import rotate as rotate
