"""Decode kernels of other systems' design, for comparison: jax-triton, no code of ours inside."""
