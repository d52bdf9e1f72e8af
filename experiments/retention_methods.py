"""The ways to spend the same bytes on a context: how many tokens each head keeps, and which.

Scores and profiles enter, masks ``[L, K, T]`` leave. All methods of one retention fill the same number
of pages to the last row: what differs is how they are divided among heads, and what chooses tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.head_profile import kept_by_all
from kvgrain_jax.budgets import HeadProfile, fill_pages, make_groups, plan_budgets
from kvgrain_jax.budgets import scores as scorers
from kvgrain_jax.errors import ConfigError

MARGIN = 2.0  # alpha of the paper


@dataclasses.dataclass(frozen=True)
class Spending:
    """What all methods have in common.

    Attributes:
      page_size: tokens of a page.
      group_size: ``G_h``.
      sinks: protected tokens at the front.
      window: protected tokens at the end.
    """

    page_size: int
    group_size: int
    sinks: int
    window: int

    def pages_per_group(self, n_tokens: int, retention: float) -> int:
        """Pages of a group on average; all but full retention keep whole pages only.

        Raises:
          ConfigError: they do not hold the protected tokens.
        """
        pages = round(retention * n_tokens / self.page_size)
        least = -(-(self.sinks + self.window) // self.page_size)
        if pages < least:
            raise ConfigError(
                f"At retention {retention} a head keeps {pages} pages of {self.page_size} tokens of a "
                f"context of {n_tokens}, and {least} are protected; protect fewer tokens or keep more."
            )
        return pages


@dataclasses.dataclass(frozen=True)
class Case:
    """One context at one retention.

    Attributes:
      scores: of the scorer, ``[L, K, T]``.
      random: random scores.
      retention: share of the tokens to keep.
      own: profile of the context's domain at this retention, of other contexts.
      other: profile of another domain.
      spending: what all methods have in common.
    """

    scores: Float[Array, "L K T"]
    random: Float[Array, "L K T"]
    retention: float
    own: HeadProfile
    other: HeadProfile
    spending: Spending


def keep_tokens(method: str, case: Case) -> Bool[Array, "L K T"]:
    """Which tokens each head keeps.

    Args:
      method: one of ``METHODS``.
      case: the context and the retention.
    """
    budgets = METHODS[method](case)
    n_tokens = case.scores.shape[-1]
    positions = jnp.arange(n_tokens, dtype=jnp.int32)
    scores = {
        "random": case.random,
        # Nothing but sinks and the newest tokens, as many as there is room for.
        "protected": jnp.broadcast_to(positions.astype(jnp.float32), case.scores.shape),
    }.get(method, case.scores)
    scores = scorers.protect(
        scores, positions, n_tokens, sinks=case.spending.sinks, window=case.spending.window
    )
    return _choose(scores, jnp.asarray(budgets, jnp.int32))


def _uniform(case: Case) -> Int[np.ndarray, "L K"]:
    shape = case.scores.shape
    pages = case.spending.pages_per_group(shape[-1], case.retention)
    return np.full(shape[:2], min(pages * case.spending.page_size, shape[-1]))


def _dynamic(case: Case) -> Int[np.ndarray, "L K"]:
    """What the heads would get if all competed for every token of this context."""
    protected = {"sinks": case.spending.sinks, "window": case.spending.window}
    return _fill(kept_by_all(case.scores, case.retention, **protected), case, group_size=1)


def _static(profile: HeadProfile, case: Case, alpha: float = 0.0) -> Int[np.ndarray, "L K"]:
    plan = plan_budgets(profile, case.retention, alpha=alpha)
    return _fill(plan.budgets(case.scores.shape[-1]), case, case.spending.group_size)


def _permuted(case: Case) -> Int[np.ndarray, "L K"]:
    budgets = _static(case.own, case)
    return np.random.default_rng(0).permutation(budgets.ravel()).reshape(budgets.shape)


METHODS: Mapping[str, Callable[[Case], Int[np.ndarray, "L K"]]] = {
    "uniform": _uniform,
    "dynamic": _dynamic,
    "static": lambda case: _static(case.own, case),
    "static_margin": lambda case: _static(case.own, case, MARGIN),
    "static_crossed": lambda case: _static(case.other, case),
    "permuted": _permuted,
    "protected": _uniform,
    "random": lambda case: _static(case.own, case),
}


def _fill(budgets: np.ndarray, case: Case, group_size: int) -> Int[np.ndarray, "L K"]:
    n_tokens = case.scores.shape[-1]
    groups = make_groups(budgets, group_size)
    pages = case.spending.pages_per_group(n_tokens, case.retention)
    return fill_pages(
        groups,
        budgets,
        n_tokens,
        page_size=case.spending.page_size,
        pages=pages * groups.n_groups,
        least=case.spending.sinks + case.spending.window,
    )


@jax.jit
def _choose(scores: Float[Array, "L K T"], budgets: Int[Array, "L K"]) -> Bool[Array, "L K T"]:
    flat = scores.reshape(-1, scores.shape[-1])
    return scorers.top_k_mask(flat, budgets.reshape(-1)).reshape(scores.shape)
