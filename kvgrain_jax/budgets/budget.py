"""Deterministic budgets: enters a head profile, leave the tokens that each head keeps of a prompt.

    B[l, h](n) = min(n, protected + ceil((n - protected) * min(1, mean + alpha * std)))

The paper's margin ``alpha = 2`` enlarges the total by a fifth to a third. ``normalise="bytes"``, the
default, scales the demands so that all heads together keep exactly as many tokens as uniform budgets
of the same retention; at equal bytes a margin takes from the heads that need most and covers less
than none, so the default is ``alpha = 0`` (``results/cpu/tangram/published_profiles``). A plan knows
the budgets of every prompt length before the prompt is seen. Source: Tangram §4.1.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float, Int

from kvgrain_jax.budgets.profile import HeadProfile, check_protected, check_retention
from kvgrain_jax.errors import ConfigError, RequestError

NORMALISATIONS = ("bytes", "none")


@dataclasses.dataclass(frozen=True, eq=False)
class BudgetPlan:
    """Tokens that each head keeps, as a function of the prompt's length.

    Clamps: no budget exceeds the prompt, and no budget is below what is protected, so a prompt that
    is hardly longer than sinks and window together keeps more than ``retention`` of its tokens.

    Attributes:
      demands: float64 ``[L, K]``, fraction of the unprotected tokens that a head asks for; may
        exceed 1 (mean plus margin), a budget never does.
      retention: share of all tokens that all heads keep together, in (0, 1].
      sinks: tokens kept at the front, part of the budget.
      window: tokens kept at the end, part of the budget.
      normalise: ``"bytes"`` scales the demands to the retention exactly, ``"none"`` takes them
        as they are.

    Raises:
      ConfigError: a value is out of range or not finite.
    """

    demands: Float[np.ndarray, "L K"]
    retention: float
    sinks: int
    window: int
    normalise: str = "bytes"

    def __post_init__(self):
        if not (np.isfinite(self.demands).all() and np.all(self.demands >= 0)):
            raise ConfigError("The demands of the heads hold NaN, infinite or negative numbers.")
        check_retention(self.retention)
        check_protected(self.sinks, self.window)
        if self.normalise not in NORMALISATIONS:
            raise ConfigError(f"normalise is {self.normalise!r}; choose 'bytes' or 'none'.")

    @property
    def n_layers(self) -> int:
        return self.demands.shape[0]

    @property
    def n_kv_heads(self) -> int:
        return self.demands.shape[1]

    def protected(self, n: int) -> int:
        """Tokens of a prompt of ``n`` tokens that every head keeps."""
        return min(n, self.sinks + self.window)

    def tokens_per_head(self, n: int) -> int:
        """Budget of every head where all are equal: ``max(protected, ceil(retention * n))``."""
        return tokens_per_head(n, self.retention, self.sinks + self.window)

    def total(self, n: int) -> int:
        """Tokens that all heads keep together of a prompt of ``n`` tokens."""
        return int(self.budgets(n).sum())

    def budgets(self, n: int) -> Int[np.ndarray, "L K"]:
        """Budgets of a prompt of ``n`` tokens, int64, each in ``[min(1, n), n]``.

        With ``normalise="bytes"`` their sum is ``L * K * tokens_per_head(n)``.

        Raises:
          RequestError: ``n`` is negative.
        """
        if n < 0:
            raise RequestError(f"A prompt of {n} tokens has no budgets; give at least 0.")
        protected = self.protected(n)
        room = n - protected
        if self.normalise == "none":
            kept = np.ceil(room * np.minimum(1.0, self.demands) - 1e-9).astype(np.int64)
        else:
            total = self.demands.size * (self.tokens_per_head(n) - protected)
            kept = share_out(self.demands, total, room)
        return np.maximum(protected + kept, min(1, n))


def plan_budgets(
    profile: HeadProfile,
    retention: float | None = None,
    *,
    alpha: float = 0.0,
    normalise: str = "bytes",
) -> BudgetPlan:
    """Budgets from a profile: each head gets its mean and ``alpha`` standard deviations.

    Args:
      profile: measured demands; its protected counts become those of the plan.
      retention: share of all tokens to keep; the profile's target where None.
      alpha: safety margin, at least 0. The paper's rule is ``alpha=2.0, normalise="none"``.
      normalise: see ``BudgetPlan``.

    Raises:
      ConfigError: the retention is outside (0, 1], alpha is negative, or demands that are not
        scaled are asked for at another retention than the profile's target.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ConfigError(f"alpha is {alpha}; give a number of at least 0.")
    retention = profile.target if retention is None else retention
    if normalise == "none" and retention != profile.target:
        raise ConfigError(
            f"The profile was measured at retention {profile.target}, asked is {retention}; use "
            "normalise='bytes' or a profile of that target."
        )
    demands = profile.mean + alpha * profile.std
    return BudgetPlan(demands, retention, profile.sinks, profile.window, normalise)


def uniform_plan(
    n_layers: int, n_kv_heads: int, retention: float, *, sinks: int, window: int
) -> BudgetPlan:
    """The same budget for every head."""
    return BudgetPlan(np.ones((n_layers, n_kv_heads)), retention, sinks, window)


def check_budgets(budgets: Int[np.ndarray, "L K"], n: int, protected: int) -> None:
    """Checks budgets that come from outside against a prompt.

    Args:
      budgets: tokens that each head keeps.
      n: tokens of the prompt.
      protected: sinks and window together.

    Raises:
      ConfigError: a budget exceeds the prompt, or does not hold the protected tokens.
    """
    if budgets.max() > n:
        raise ConfigError(
            f"A budget of {budgets.max()} tokens exceeds the prompt of {n}; clamp it to the prompt."
        )
    least = min(n, max(protected, 1))
    if budgets.min() < least:
        raise ConfigError(
            f"A budget of {budgets.min()} tokens does not hold the {least} protected ones; raise it "
            "or protect fewer tokens."
        )


def share_out(
    demands: Float[np.ndarray, "*shape"], total: int, cap: int | Int[np.ndarray, "*shape"]
) -> Int[np.ndarray, "*shape"]:
    """Whole numbers proportional to demands, none above its cap, that sum to ``total`` exactly.

    What a capped element cannot take goes to the others in proportion; where only elements that
    demand nothing are left, they share the rest in proportion to their caps. Fractions are rounded
    by largest remainder, ties in the order of the elements.

    Raises:
      ConfigError: ``total`` is negative or more than all caps together.
    """
    flat, caps = demands.ravel(), np.broadcast_to(cap, demands.shape).ravel().astype(np.float64)
    if not 0 <= total <= caps.sum():
        raise ConfigError(f"{total} cannot be shared out among {flat.size} caps of {caps.sum():g}.")
    shares = _proportional(flat, float(total), caps)
    rest = total - shares.sum()
    if rest > 1e-9 * max(total, 1):
        shares = shares + _proportional(caps - shares, rest, caps - shares)
    kept = np.floor(shares + 1e-9).astype(np.int64)
    order = np.lexsort((np.arange(flat.size), kept - shares))
    open_ = order[kept[order] < caps[order]]
    kept[open_[: total - kept.sum()]] += 1
    return kept.reshape(demands.shape)


def tokens_per_head(n: int, retention: float, protected: int) -> int:
    """Budget of every head where all are equal, of a prompt of ``n`` tokens: never less than what is
    protected, never more than the prompt."""
    # 0.55 * 100 is 55, not 56: the last digit of the product must not count.
    return max(min(n, protected), math.ceil(retention * n - 1e-9))


def _proportional(
    weights: Float[np.ndarray, " n"], total: float, caps: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """``min(caps, c * weights)`` with the ``c`` that makes the sum ``total``, or all there is."""
    positive = weights > 0
    fills_at = np.full(weights.shape, np.inf)
    fills_at[positive] = caps[positive] / weights[positive]  # the c at which an element is full
    order = np.argsort(fills_at, kind="stable")
    full = np.concatenate([[0.0], np.cumsum(np.where(positive, caps, 0.0)[order])])
    free = weights.sum() - np.concatenate([[0.0], np.cumsum(weights[order])])
    for m in range(int(positive.sum())):
        scale = (total - full[m]) / free[m] if free[m] > 0 else np.inf
        if scale <= fills_at[order[m]]:
            return np.where(positive, np.minimum(caps, scale * weights), 0.0)
    return np.where(positive, caps, 0.0)
