"""Residual sum and RMS norm."""

from pallas_kernels.add_rms_norm.api import add_rms_norm as add_rms_norm
from pallas_kernels.add_rms_norm.xla import rms_norm as rms_norm
