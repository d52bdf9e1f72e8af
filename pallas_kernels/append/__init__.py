"""Writing new keys and values into their slots."""

from pallas_kernels.append.api import append_kv as append_kv
