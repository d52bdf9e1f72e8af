"""Binaries that run KVGrain on workloads and write down what they measured.

Run them from a checkout, ``python -m experiments.NAME``; none of this goes into the wheel.
"""
