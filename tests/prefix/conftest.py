"""Prefix indices for the tests."""

import pytest

from kvgrain_jax.prefix.radix import RadixIndex


@pytest.fixture
def index():
    """Every test ends with a tree that agrees with itself."""
    index = RadixIndex(page_size=1)
    yield index
    index.check_integrity()


@pytest.fixture
def paged():
    index = RadixIndex(page_size=4)
    yield index
    index.check_integrity()
