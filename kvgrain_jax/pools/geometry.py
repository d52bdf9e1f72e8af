"""Sizes of the pools: enters a budget in tokens or bytes, leaves how many slots each region has."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvgrain_jax.errors import ConfigError

PAGE_SIZES = (1, 4, 16)


@dataclasses.dataclass(frozen=True)
class PoolGeometry:
    """How one index space of ``n_slots`` token slots is cut into a HOT and a COLD region.

    Slots ``[0, n_hot)`` are HOT, ``[n_hot, n_slots)`` are COLD. Both are multiples of the page
    size, so a page never lies across the boundary.

    Attributes:
      n_layers: ``L``, pairs of key and value arrays.
      n_kv_heads: ``K``.
      head_dim: ``D``.
      n_slots: ``N``, tokens that fit in all.
      n_hot: tokens of the HOT region.
      page_size: tokens of a COLD page: 1, 4 or 16.
      slab_align: HOT slab bases are multiples of this many tokens (the kernels' KV tile).
      max_slabs: live HOT slabs at most.
      dtype: of keys and values.

    Raises:
      ConfigError: a size is not positive or does not fit the others.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_slots: int
    n_hot: int
    page_size: int = 1
    slab_align: int = 64
    max_slabs: int = 256
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        for name in ("n_layers", "n_kv_heads", "head_dim", "n_slots", "slab_align", "max_slabs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive number.")
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size is {self.page_size}; choose one of {PAGE_SIZES}.")
        if not 0 <= self.n_hot <= self.n_slots:
            raise ConfigError(f"n_hot is {self.n_hot}; give a number in [0, {self.n_slots}].")
        if self.n_slots % self.page_size or self.n_hot % self.page_size:
            raise ConfigError(
                f"n_slots {self.n_slots} and n_hot {self.n_hot} must be multiples of the page "
                f"size {self.page_size}."
            )
        if self.slab_align % self.page_size:
            raise ConfigError(
                f"slab_align {self.slab_align} must be a multiple of the page size {self.page_size}."
            )
        if self.n_slots >= 2**31:
            raise ConfigError(f"n_slots is {self.n_slots}; slots are int32, so at most 2**31 - 1.")

    @property
    def n_pages(self) -> int:
        """Pages in the whole index space; HOT and COLD pages share one numbering."""
        return self.n_slots // self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        item = jnp.dtype(self.dtype).itemsize
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * item

    @classmethod
    def from_tokens(
        cls, tokens: int, *, hot_fraction: float = 0.2, page_size: int = 1, **fields
    ) -> "PoolGeometry":
        """Geometry that holds ``tokens`` tokens, ``hot_fraction`` of them in HOT.

        Args:
          tokens: tokens in all; rounded down to whole pages.
          hot_fraction: share of HOT in [0, 1] (``f_p`` of the paper, 0.2 by default).
          page_size: tokens of a COLD page.
          **fields: the other attributes of ``PoolGeometry``.

        Raises:
          ConfigError: the fraction is outside [0, 1], or no page fits.
        """
        if not (math.isfinite(hot_fraction) and 0 <= hot_fraction <= 1):
            raise ConfigError(f"hot_fraction is {hot_fraction}; give a number in [0, 1].")
        if page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size is {page_size}; choose one of {PAGE_SIZES}.")
        n_pages = tokens // page_size
        if n_pages < 1:
            raise ConfigError(f"A pool of {tokens} tokens holds no page of {page_size} tokens.")
        n_hot = round(hot_fraction * n_pages) * page_size
        return cls(n_slots=n_pages * page_size, n_hot=n_hot, page_size=page_size, **fields)

    @classmethod
    def from_bytes(
        cls,
        n_bytes: int,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = jnp.float32,
        **fields,
    ) -> "PoolGeometry":
        """Geometry of the keys and values that fit in ``n_bytes``; else as ``from_tokens``."""
        per_token = 2 * n_layers * n_kv_heads * head_dim * jnp.dtype(dtype).itemsize
        return cls.from_tokens(
            n_bytes // per_token,
            n_layers=n_layers,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            **fields,
        )
