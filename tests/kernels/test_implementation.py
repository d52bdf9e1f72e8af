"""The choice of an implementation: what runs, what is refused, and that it can be asked for."""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.implementation import (
    ENVIRONMENT_VARIABLE,
    ImplementationError,
    interpreted,
    override,
    recorded,
    select,
)

CANDIDATES = {
    "fast": (lambda: "fast", "it needs another device"),
    "good": (lambda: "good", None),
    "plain": (lambda: "plain", None),
}


def test_auto_takes_the_first_that_can_run():
    assert select("op", "auto", CANDIDATES)() == "good"


def test_a_name_takes_that_one():
    assert select("op", "plain", CANDIDATES)() == "plain"


def test_one_that_cannot_run_says_why():
    with pytest.raises(ImplementationError, match="op cannot run as fast: it needs another device"):
        select("op", "fast", CANDIDATES)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ImplementationError, match="choose auto or one of fast, good, plain"):
        select("op", "magic", CANDIDATES)


def test_where_none_can_run_all_reasons_are_given():
    candidates = {"a": (print, "no GPU"), "b": (print, "no memory")}
    with pytest.raises(ImplementationError, match="a: no GPU; b: no memory"):
        select("op", "auto", candidates)


def test_the_environment_variable_is_preferred(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "plain")
    assert select("op", "auto", CANDIDATES)() == "plain"


def test_a_preferred_one_that_cannot_run_is_passed_over(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fast")
    assert select("op", "auto", CANDIDATES)() == "good"


def test_override_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fast")
    with override("plain"):
        assert select("op", "auto", CANDIDATES)() == "plain"
    assert select("op", "auto", CANDIDATES)() == "good"


def test_the_path_taken_is_recorded():
    with recorded() as outer:
        select("first", "auto", CANDIDATES)
        with recorded() as inner:
            select("second", "plain", CANDIDATES)
    assert inner == [("second", "plain")]
    assert outer == [("first", "good"), ("second", "plain")]


def append(implementation):
    pool, new = jnp.zeros((8, 1, 64)), jnp.ones((1, 1, 64))
    slots = jnp.zeros(1, jnp.int32)
    return pallas_kernels.append_kv(pool, pool, new, new, slots, implementation=implementation)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what holds without a GPU")
def test_without_a_gpu_kernels_are_refused_and_auto_is_xla():
    with pytest.raises(ImplementationError, match="runs on cpu"):
        append("triton")
    with recorded() as taken:
        append("auto")
    assert taken == [("append_kv", "xla")]


def test_interpreted_kernels_are_taken_anywhere():
    with interpreted(), recorded() as taken:
        append("auto")
    assert taken == [("append_kv", "triton")]
