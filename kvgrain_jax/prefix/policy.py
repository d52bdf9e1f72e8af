"""Admission policies: when a shared prefix may take a HOT slab.

A policy only says what it wants. Whether a slab is free, and what is evicted for it, is decided by
the caller; a prefix that gets none stays in COLD pages.
"""

import dataclasses
from typing import Protocol, runtime_checkable

from kvgrain_jax.errors import ConfigError


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Anything with this one method can be used as a policy."""

    def wants_hot(self, node_hits: int, declared: bool, tokens: int) -> bool:
        """Whether a prefix should lie in HOT.

        Args:
          node_hits: requests that have used the prefix, the present one included.
          declared: whether a caller declared it to be a shared prefix.
          tokens: its length.
        """
        ...


def _is_prefix(node_hits: int, declared: bool) -> bool:
    return declared or node_hits >= 2


@dataclasses.dataclass(frozen=True)
class Always:
    """HOT as soon as a prefix is known to be one (GraniKV, appendix B.10).

    That is at the first use of a declared prefix, and when a second request shares an undeclared
    one.

    Attributes:
      min_tokens: shorter prefixes stay in COLD, where a few tokens cost little.

    Raises:
      ConfigError: ``min_tokens`` is negative.
    """

    min_tokens: int = 64

    def __post_init__(self):
        _check_min_tokens(self.min_tokens)

    def wants_hot(self, node_hits: int, declared: bool, tokens: int) -> bool:
        """See :class:`AdmissionPolicy`."""
        return tokens >= self.min_tokens and _is_prefix(node_hits, declared)


@dataclasses.dataclass(frozen=True)
class AfterHits:
    """HOT at the ``n``-th use of a prefix, by one copy on the device, declared or not.

    ``n = 1`` is the same as :class:`Always`: tokens that one request used are no prefix unless
    they are declared.

    Attributes:
      n: uses, at least 1.
      min_tokens: shorter prefixes stay in COLD.

    Raises:
      ConfigError: ``n`` is below 1 or ``min_tokens`` is negative.
    """

    n: int
    min_tokens: int = 64

    def __post_init__(self):
        if self.n < 1:
            raise ConfigError(f"after_hits needs a number of uses of at least 1, not {self.n}.")
        _check_min_tokens(self.min_tokens)

    def wants_hot(self, node_hits: int, declared: bool, tokens: int) -> bool:
        """See :class:`AdmissionPolicy`."""
        return tokens >= self.min_tokens and node_hits >= self.n and _is_prefix(node_hits, declared)


def _check_min_tokens(min_tokens: int) -> None:
    if min_tokens < 0:
        raise ConfigError(f"min_tokens is {min_tokens}; give 0 or more.")


def parse(text: str, min_tokens: int = 64) -> Always | AfterHits:
    """The policy that a configuration names.

    Args:
      text: ``"always"``, or ``"after_hits:N"`` with a whole number ``N`` of at least 1.
      min_tokens: prefixes shorter than this stay in COLD.

    Raises:
      ConfigError: the text names no policy, or a number is out of range.
    """
    name, colon, count = text.partition(":")
    if name == "always" and not colon:
        return Always(min_tokens)
    if name == "after_hits" and count.isascii() and count.isdigit():
        return AfterHits(int(count), min_tokens)
    raise ConfigError(
        f"There is no admission policy {text!r}; write 'always', or 'after_hits:N' with a whole "
        "number N of at least 1, such as 'after_hits:3'."
    )
