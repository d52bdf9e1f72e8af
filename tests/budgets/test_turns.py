"""What turns and chunks are cut down to, in numbers worked out by hand."""

import numpy as np
import pytest

from kvgrain_jax import ConfigError
from kvgrain_jax.budgets import make_groups, uniform_plan
from kvgrain_jax.budgets.turns import Span, SpanPlan, most_held, pages_of, plan_spans

PLAN = uniform_plan(1, 2, 0.5, sinks=2, window=4)
SPANS = [Span(np.zeros(n, np.int32), n != 5) for n in (40, 5, 20)]  # prompt, answer, prompt


def held(policy: str, first: int = 0) -> list[tuple[int, int]]:
    """Tokens that a head holds before and after each span."""
    plans = plan_spans(SPANS, PLAN, policy, first=first)
    return [(int(plan.before[0, 0]), int(plan.after[0, 0])) for plan in plans]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("first_prompt_only", [(0, 20), (20, 25), (25, 45)]),
        ("each_turn", [(0, 20), (20, 25), (25, 35)]),
        ("rebudget", [(0, 20), (20, 25), (25, 33)]),  # half of all 65, rounded up
    ],
)
def test_policies_keep_what_they_say(policy, expected):
    assert held(policy) == expected


def test_rebudget_may_hold_less_than_before():
    spans = [Span(np.zeros(n, np.int32), n != 30) for n in (40, 30, 10)]
    plan = plan_spans(spans, PLAN, "rebudget")[-1]
    assert (plan.before[0, 0], plan.after[0, 0]) == (50, 40)
    assert plan.shrinks
    assert plan.held(4, "final")[0, 0] == 40


def test_behind_a_shared_prefix_the_first_prompt_is_whole_or_a_turn_of_its_own():
    assert held("first_prompt_only", first=100)[0] == (0, 40)
    assert held("each_turn", first=100)[0] == (0, 20)
    plan = plan_spans(SPANS, PLAN, "each_turn", first=100)[0]
    assert (plan.first, plan.keep_before) == (100, 100)


def span_plan(before: int, after: int, n: int, first: int = 0) -> SpanPlan:
    heads = np.full((1, 1), before), np.full((1, 1), after)
    return SpanPlan(first, n, *heads, keep_before=2 if first == 0 else first, window=4)


def test_final_floor_gives_the_whole_budget_from_the_start():
    plan = span_plan(0, 20, 40)
    assert [int(plan.held(done, "final")[0, 0]) for done in (0, 8, 20, 32, 40)] == [
        0,
        8,
        20,
        20,
        20,
    ]


def test_proportional_floor_grows_with_the_prompt_and_ends_at_the_budget():
    plan = span_plan(0, 20, 40)
    # Six are protected; of the other 34 tokens 14 stay: floor(14 * (done - 6) / 34) on top.
    expected = [0, 6 + 0, 6 + 5, 6 + 10, 20]
    assert [int(plan.held(done, "proportional")[0, 0]) for done in (0, 8, 20, 32, 40)] == expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_proportional_floors_of_any_chunks_add_up_to_the_budget(chunk):
    plan = span_plan(9, 29, 40, first=30)
    totals = [int(plan.held(min(d, 40), "proportional")[0, 0]) for d in range(0, 40 + chunk, chunk)]
    assert totals == sorted(totals)
    assert totals[-1] == 29
    assert all(total - 9 <= d for total, d in zip(totals, range(0, 40 + chunk, chunk), strict=True))


def test_footprint_covers_the_most_that_is_ever_held():
    spans = [Span(np.zeros(n, np.int32), n != 30) for n in (40, 30, 10)]
    plans = plan_spans(spans, PLAN, "rebudget")
    assert most_held(plans, growth=3).tolist() == [[50, 50]]
    assert most_held(plans, growth=15).tolist() == [[55, 55]]
    groups = make_groups(PLAN.demands, 2)
    assert pages_of(groups, plans, 3, page_size=16).tolist() == [4]


def test_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="no policy 'never'"):
        held("never")
