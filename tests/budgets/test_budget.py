"""Deterministic budgets: the formula, its clamps, and sums that are exact."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from test_profile import make_profile

from kvgrain_jax.budgets import BudgetPlan, check_budgets, plan_budgets, uniform_plan
from kvgrain_jax.budgets.budget import share_out
from kvgrain_jax.errors import ConfigError, RequestError

DEMANDS = arrays.arrays(
    np.float64, (3, 4), elements=st.floats(0, 2, allow_subnormal=False).map(lambda x: round(x, 3))
)


def test_the_papers_rule_is_mean_and_two_standard_deviations():
    profile = make_profile([[[0.1, 0.5]], [[0.3, 0.5]]])
    plan = plan_budgets(profile, alpha=2.0, normalise="none")
    std = math.sqrt(0.02)
    # 16 of 116 tokens are protected.
    expected = [[16 + math.ceil(100 * (0.2 + 2 * std)), 16 + 50]]
    np.testing.assert_array_equal(plan.budgets(116), expected)


def test_a_budget_never_exceeds_the_prompt():
    plan = plan_budgets(make_profile([[[0.1]], [[0.9]]]), alpha=5.0, normalise="none")
    assert plan.budgets(50)[0, 0] == 50


def test_scaled_budgets_keep_the_ratios_of_the_demands():
    plan = BudgetPlan(np.array([[0.1, 0.2, 0.3]]), 0.5, sinks=0, window=0)
    np.testing.assert_array_equal(plan.budgets(120), [[30, 60, 90]])


def test_what_a_full_head_cannot_take_goes_to_the_others():
    plan = BudgetPlan(np.array([[1.0, 0.1, 0.1]]), 0.5, sinks=0, window=0)
    np.testing.assert_array_equal(plan.budgets(100), [[100, 25, 25]])


def test_heads_that_demand_nothing_share_what_the_others_cannot_take():
    plan = BudgetPlan(np.array([[1.0, 0.0, 0.0]]), 0.5, sinks=0, window=0)
    np.testing.assert_array_equal(plan.budgets(100), [[100, 25, 25]])


def test_a_profile_without_demands_gives_uniform_budgets():
    plan = BudgetPlan(np.zeros((2, 2)), 0.25, sinks=4, window=4)
    np.testing.assert_array_equal(plan.budgets(100), np.full((2, 2), 25))


@settings(deadline=None)
@given(DEMANDS, st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.55, 0.75, 1.0]), st.integers(0, 500))
def test_scaled_budgets_sum_to_those_of_uniform_budgets_exactly(demands, retention, n):
    plan = BudgetPlan(demands, retention, sinks=2, window=6)
    uniform = uniform_plan(3, 4, retention, sinks=2, window=6)
    assert plan.total(n) == uniform.total(n) == 12 * plan.tokens_per_head(n)
    budgets = plan.budgets(n)
    assert np.all((budgets >= min(n, 8)) & (budgets <= n))


@settings(deadline=None)
@given(DEMANDS, st.integers(1, 400))
def test_a_head_that_demands_more_never_gets_less(demands, n):
    budgets = BudgetPlan(demands, 0.3, sinks=1, window=3).budgets(n).ravel()
    order = np.argsort(demands.ravel(), kind="stable")
    # Rounding may favour the first of two neighbours by one token.
    assert np.all(np.diff(budgets[order]) >= -1)


def test_a_prompt_shorter_than_what_is_protected_is_kept_whole():
    plan = uniform_plan(1, 2, 0.1, sinks=4, window=12)
    np.testing.assert_array_equal(plan.budgets(10), [[10, 10]])


def test_protected_tokens_are_kept_where_they_exceed_the_retention():
    plan = uniform_plan(1, 2, 0.1, sinks=4, window=12)
    np.testing.assert_array_equal(plan.budgets(100), [[16, 16]])


def test_no_budget_rounds_to_zero():
    plan = BudgetPlan(np.array([[0.0, 1.0]]), 0.5, sinks=0, window=0, normalise="none")
    np.testing.assert_array_equal(plan.budgets(5), [[1, 5]])


def test_an_empty_prompt_has_empty_budgets():
    assert uniform_plan(1, 2, 0.5, sinks=4, window=4).total(0) == 0


def test_full_retention_keeps_everything():
    plan = BudgetPlan(np.array([[0.0, 0.5, 2.0]]), 1.0, sinks=0, window=0)
    np.testing.assert_array_equal(plan.budgets(77), [[77, 77, 77]])


def test_products_that_are_whole_are_not_rounded_up():
    assert uniform_plan(1, 1, 0.55, sinks=0, window=0).tokens_per_head(100) == 55


@pytest.mark.parametrize("retention", [0.0, -0.5, 1.01, math.nan])
def test_a_retention_outside_0_1_is_an_error(retention):
    with pytest.raises(ConfigError, match=r"give a number in \(0, 1\]"):
        plan_budgets(make_profile([[[0.5]]]), retention)


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf])
def test_an_alpha_that_cannot_be_is_an_error(alpha):
    with pytest.raises(ConfigError, match="alpha is"):
        plan_budgets(make_profile([[[0.5]]]), alpha=alpha)


def test_unscaled_demands_hold_for_their_own_target_only():
    with pytest.raises(ConfigError, match=r"measured at retention 0.25, asked is 0.5"):
        plan_budgets(make_profile([[[0.5]]]), 0.5, normalise="none")


@pytest.mark.parametrize("demand", [math.nan, math.inf, -0.1])
def test_demands_that_cannot_be_are_errors(demand):
    with pytest.raises(ConfigError, match="demands"):
        BudgetPlan(np.array([[demand]]), 0.5, 0, 0)


def test_an_unknown_normalisation_is_an_error():
    with pytest.raises(ConfigError, match="normalise is 'sum'"):
        BudgetPlan(np.ones((1, 1)), 0.5, 0, 0, "sum")


def test_a_negative_prompt_is_an_error():
    with pytest.raises(RequestError, match="-1 tokens"):
        uniform_plan(1, 1, 0.5, sinks=0, window=0).budgets(-1)


def test_budgets_from_outside_must_not_exceed_the_prompt():
    with pytest.raises(ConfigError, match="101 tokens exceeds the prompt of 100"):
        check_budgets(np.array([[50, 101]]), 100, 16)


def test_budgets_from_outside_must_hold_the_protected_tokens():
    with pytest.raises(ConfigError, match="15 tokens does not hold the 16 protected"):
        check_budgets(np.array([[50, 15]]), 100, 16)


def test_budgets_from_outside_that_fit_are_accepted():
    check_budgets(np.array([[16, 100]]), 100, 16)


@settings(deadline=None)
@given(
    arrays.arrays(np.float64, 8, elements=st.floats(0, 5).map(lambda x: round(x, 2))),
    arrays.arrays(np.int64, 8, elements=st.integers(0, 40)),
    st.floats(0, 1),
)
def test_shares_are_whole_within_their_caps_and_sum_exactly(demands, caps, part):
    total = int(part * caps.sum())
    shares = share_out(demands, total, caps)
    assert shares.sum() == total
    assert np.all((shares >= 0) & (shares <= caps))


def test_more_than_all_caps_cannot_be_shared_out():
    with pytest.raises(ConfigError, match="7 cannot be shared out"):
        share_out(np.ones(2), 7, 3)
