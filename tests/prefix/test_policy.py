"""Admission policies: when a prefix may go to HOT."""

import pytest

from kvgrain_jax.errors import ConfigError
from kvgrain_jax.prefix.policy import AfterHits, Always, parse


@pytest.mark.parametrize(
    ("hits", "declared", "wants"),
    [(1, False, False), (1, True, True), (2, False, True), (7, True, True)],
)
def test_always_wants_every_known_prefix_in_hot(hits, declared, wants):
    assert Always().wants_hot(hits, declared, tokens=64) is wants


@pytest.mark.parametrize(
    ("n", "hits", "declared", "wants"),
    [
        (3, 2, True, False),
        (3, 3, False, True),
        (3, 4, False, True),
        (1, 1, False, False),
        (1, 1, True, True),
        (1, 2, False, True),
    ],
)
def test_after_hits_wants_a_prefix_in_hot_at_its_nth_use(n, hits, declared, wants):
    assert AfterHits(n).wants_hot(hits, declared, tokens=64) is wants


@pytest.mark.parametrize("policy", [Always(min_tokens=10), AfterHits(2, min_tokens=10)])
def test_short_prefixes_stay_in_cold(policy):
    assert not policy.wants_hot(5, True, tokens=9)
    assert policy.wants_hot(5, True, tokens=10)


def test_policies_are_named_in_configurations():
    assert parse("always") == Always(min_tokens=64)
    assert parse("after_hits:3", min_tokens=16) == AfterHits(3, min_tokens=16)


@pytest.mark.parametrize(
    "text", ["", "never", "always:1", "after_hits", "after_hits:", "after_hits:x", "after_hits:-1"]
)
def test_an_unknown_policy_is_refused(text):
    with pytest.raises(ConfigError, match="no admission policy"):
        parse(text)


@pytest.mark.parametrize("text", ["after_hits:0"])
def test_a_use_before_the_first_is_refused(text):
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        parse(text)


@pytest.mark.parametrize("make", [lambda: Always(-1), lambda: AfterHits(2, -1)])
def test_a_negative_minimum_length_is_refused(make):
    with pytest.raises(ConfigError, match="min_tokens is -1"):
        make()
