"""Turns: what a conversation's tokens are cut down to, turn by turn, known before any is computed.

Enter the spans of a sequence (prompt, answer, prompt, ...) and a policy, leave for each span how
many tokens every head holds before and after it. Two sequences of the same spans are compressed in
the same way, so one whose cache was dropped is computed again from its spans, and says the same.

| policy | a turn's prompt | earlier turns |
| --- | --- | --- |
| `first_prompt_only` (the paper) | the first to its budget, later ones whole | stay |
| `each_turn` | each to its own budget | what survived stays |
| `rebudget` | with all before to the budget of all | compete again |

Answers are appended whole; only `rebudget` ever thins them. Source: Tangram §2.1, §4.1.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvgrain_jax.budgets.budget import BudgetPlan
from kvgrain_jax.budgets.groups import HeadGroups, group_pages
from kvgrain_jax.errors import ConfigError

TURN_POLICIES = ("first_prompt_only", "each_turn", "rebudget")
FLOORS = ("final", "proportional")


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of a sequence that are compressed together or not at all.

    Attributes:
      tokens: token ids, int32, at least one.
      is_prompt: a user's turn, which the policy may compress; an answer is kept whole.
    """

    tokens: np.ndarray
    is_prompt: bool


@dataclasses.dataclass(frozen=True, eq=False)
class SpanPlan:
    """What every head holds around one span.

    Attributes:
      first: position of the span's first token.
      n_tokens: tokens of the span.
      before: tokens that each head holds in front of it.
      after: tokens that each head holds behind it.
      keep_before: tokens at positions below stay in any case: sinks, or all that came earlier.
      window: last tokens so far that stay in any case.
    """

    first: int
    n_tokens: int
    before: Int[np.ndarray, "L K"]
    after: Int[np.ndarray, "L K"]
    keep_before: int
    window: int

    @property
    def selects(self) -> bool:
        """Whether some head does not keep everything."""
        return bool((self.after < self.before + self.n_tokens).any())

    @property
    def shrinks(self) -> bool:
        """Whether some head holds fewer tokens afterwards."""
        return bool((self.after < self.before).any())

    def held(self, done: int, floors: str) -> Int[np.ndarray, "L K"]:
        """Tokens that each head holds once ``done`` tokens of the span are computed.

        Args:
          done: tokens computed, at most ``n_tokens``.
          floors: ``"final"`` gives a head its whole budget from the first chunk on, which is there
            anyway and finds the best tokens exactly; ``"proportional"`` gives it the protected
            tokens and of the rest a share that grows with the prompt, in whole tokens rounded
            down, so that earlier tokens leave no more room than they will have in the end.
        """
        if done == 0:
            return self.before
        available = self.before + done
        if floors == "final" or not self.selects or done == self.n_tokens:
            return np.minimum(available, self.after)
        if self.shrinks or self.keep_before < self.first:  # all tokens compete
            base, there, in_all = 0, available, self.before + self.n_tokens
        else:
            base, there, in_all = self.before, done, self.n_tokens
        budget = self.after - base
        protected = np.minimum(budget, self.window + (self.keep_before if self.first == 0 else 0))
        share = (budget - protected) * np.maximum(there - protected, 0)
        floor = protected + share // np.maximum(in_all - protected, 1)
        return np.minimum(available, base + floor)


def plan_spans(
    spans: Sequence[Span], plan: BudgetPlan, policy: str, *, first: int = 0
) -> list[SpanPlan]:
    """Plan every span of a sequence.

    Args:
      spans: the spans.
      plan: budgets of its prompts.
      policy: what turns keep.
      first: position of the first token, behind a shared prefix, which is the first prompt then
        and lies elsewhere: its tokens never compete with these.

    Raises:
      ConfigError: there is no such policy.
    """
    if policy not in TURN_POLICIES:
        raise ConfigError(f"There is no policy {policy!r}; choose one of {TURN_POLICIES}.")
    found: list[SpanPlan] = []
    shared, held = first, np.zeros(plan.demands.shape, np.int64)
    for span in spans:
        n = len(span.tokens)
        keep_before = plan.sinks
        if not span.is_prompt or (policy == "first_prompt_only" and first > 0):
            after = held + n
        elif policy == "rebudget":
            after = np.minimum(held + n, plan.budgets(first - shared + n))
        else:
            after = held + plan.budgets(n)
            keep_before = max(keep_before, first)
        found.append(SpanPlan(first, n, held, after, keep_before, plan.window))
        held, first = after, first + n
    return found


def most_held(plans: Sequence[SpanPlan], growth: int) -> Int[np.ndarray, "L K"]:
    """The most tokens that each head holds at any time, ``growth`` decoded tokens included."""
    return np.max([*(plan.after for plan in plans), plans[-1].after + growth], axis=0)


def pages_of(
    groups: HeadGroups, plans: Sequence[SpanPlan], growth: int, page_size: int
) -> Int[np.ndarray, " n_groups"]:
    """Pages of each group that a sequence needs: its exact footprint, known before it runs.

    Args:
      groups: the head groups.
      plans: the spans that are still to be computed, and the tokens held before them.
      growth: tokens that decoding may append to every head.
      page_size: rows of a page.
    """
    return group_pages(groups, most_held(plans, growth), page_size)
