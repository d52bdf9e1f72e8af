"""Per-step dispatch."""

import jax.numpy as jnp
import pytest

from kvgrain_jax import ConfigError, make_rule
from kvgrain_jax.attention.dispatch import device_m_sat


def choice(rule, rows, group, n_segments):
    return rule.backends[int(rule.choose(jnp.int32(rows), group, jnp.int32(n_segments)))]


def test_dense_from_the_threshold_on_and_cascade_below():
    rule = make_rule("auto", m_sat=1024)
    assert choice(rule, 256, 4, 1) == "dense"
    assert choice(rule, 255, 4, 1) == "cascade"
    assert choice(rule, 128, 8, 3) == "dense"


def test_paged_where_no_row_has_a_contiguous_prefix():
    assert choice(make_rule("auto", m_sat=1), 256, 4, 0) == "paged"


@pytest.mark.parametrize("backend", ["dense", "cascade", "paged", "cascade16"])
def test_single_backend_is_taken_always(backend):
    assert choice(make_rule(backend), 1, 1, 0) == backend


def test_a100_has_the_threshold_of_the_paper():
    assert device_m_sat("NVIDIA A100-SXM4-40GB") == 1024


def test_unknown_backend_and_bad_threshold_are_refused():
    with pytest.raises(ConfigError, match="no backend 'fast'"):
        make_rule("fast")
    with pytest.raises(ConfigError, match="m_sat is 0"):
        make_rule("auto", m_sat=0)
