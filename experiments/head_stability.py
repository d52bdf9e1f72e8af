"""Is a head's demand a property of the model? Figures of one profile, and of published ones.

A profile enters; leaves how alike the ranking of the heads is in halves of its samples and in its
domains, and which share of the demanded tokens each budget rule leaves uncovered on samples that the
rule has not seen.
"""

import itertools
import json
import os
import zipfile
from typing import Any

import numpy as np

from kvgrain_jax.budgets import (
    BudgetPlan,
    HeadProfile,
    plan_budgets,
    retained_fractions,
    uniform_plan,
)
from kvgrain_jax.budgets.profile import spearman, split_half_stability
from kvgrain_jax.errors import ConfigError

SPLITS = 100


def stability(profile: HeadProfile, *, alpha: float, seed: int) -> dict[str, Any]:
    """Figures of a profile.

    Args:
      profile: at least two samples.
      alpha: margin of the rules with one.
      seed: of the random halves.

    Returns:
      ``samples``; ``halves_mean`` and ``halves_min``: Spearman's correlation of the heads' means
      between random halves; ``pairs_mean``: between single samples; ``domains``: between the means of each
      pair of domains; ``std_between_heads`` and ``std_within_head`` of the fractions;
      ``largest_over_smallest``: ratio of kept tokens, protected ones included, between the heads
      of the median context; ``rules``: for each rule ``uncovered``, its 95% interval over halves
      (``low``, ``high``), and ``bytes`` relative to uniform budgets.

    Raises:
      ConfigError: there is one sample only.
    """
    halves = split_half_stability(profile, splits=SPLITS, seed=seed)
    mean_rule = BudgetPlan(profile.mean, profile.target, profile.sinks, profile.window, "none")
    kept = mean_rule.budgets(int(np.median(profile.lengths)))
    names = sorted(set(profile.domains))
    return {
        "scorer": profile.scorer,
        "checkpoint": profile.checkpoint,
        "target": profile.target,
        "samples": len(profile.fractions),
        "heads": profile.mean.size,
        "halves_mean": float(halves.mean()),
        "halves_min": float(halves.min()),
        "pairs_mean": float(
            np.mean([spearman(a, b) for a, b in itertools.combinations(profile.fractions, 2)])
        ),
        "domains": {
            f"{a}, {b}": spearman(profile.of_domain(a).mean, profile.of_domain(b).mean)
            for a, b in itertools.combinations(names, 2)
        },
        "std_between_heads": float(profile.mean.std()),
        "std_within_head": float(profile.std.mean()),
        "largest_over_smallest": float(kept.max() / kept.min()),
        "rules": _coverage(profile, alpha, seed),
    }


def _rules(train: HeadProfile, alpha: float) -> dict[str, BudgetPlan]:
    shape = (train.n_layers, train.n_kv_heads)
    protected = {"sinks": train.sinks, "window": train.window}
    return {
        "uniform": uniform_plan(*shape, train.target, **protected),
        "mean": plan_budgets(train, alpha=0.0, normalise="none"),
        f"mean + {alpha:g} std": plan_budgets(train, alpha=alpha, normalise="none"),
        "mean, equal bytes": plan_budgets(train, alpha=0.0),
        f"mean + {alpha:g} std, equal bytes": plan_budgets(train, alpha=alpha),
    }


def _coverage(profile: HeadProfile, alpha: float, seed: int) -> dict[str, dict[str, float]]:
    """Rules made of one random half, demands of the other."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[tuple[float, float]]] = {}
    n, length = len(profile.fractions), int(np.median(profile.lengths))
    for _ in range(SPLITS):
        order = rng.permutation(n)
        train, held_out = profile.subset(order[: n // 2]), profile.subset(order[n // 2 :])
        plans = _rules(train, alpha)
        protected = plans["uniform"].protected(length)
        demanded = held_out.fractions * (length - protected)
        uniform = plans["uniform"].total(length)
        for rule, plan in plans.items():
            given = plan.budgets(length) - protected
            missing = np.maximum(demanded - given, 0.0).sum() / demanded.sum()
            found.setdefault(rule, []).append((missing, plan.total(length) / uniform))
    return {
        rule: {
            "uncovered": float(np.mean([missing for missing, _ in pairs])),
            "low": float(np.percentile([missing for missing, _ in pairs], 2.5)),
            "high": float(np.percentile([missing for missing, _ in pairs], 97.5)),
            "bytes": float(np.mean([size for _, size in pairs])),
        }
        for rule, pairs in found.items()
    }


def read_published(path: str | os.PathLike[str]) -> HeadProfile:
    """Reads a profile of the format of the Tangram authors' ``build_profile`` tool.

    ``raw_kept [1, samples, L, K]`` counts protected tokens; a row of ``sample_meta`` is (tokens
    after the sinks, sinks, tokens, window). Samples come in the order of the mix of data sets that
    ``meta`` names, and their domain is the data set.

    Raises:
      ConfigError: the file cannot be read or has another format.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            kept, samples = file["raw_kept"], file["sample_meta"]
            meta = json.loads(file["meta"].tobytes())
        if kept.ndim != 4 or len(kept) != 1 or samples.shape != (kept.shape[1], 4):
            raise ValueError(f"raw_kept is {kept.shape} and sample_meta {samples.shape}")
        (sinks,), (window,) = np.unique(samples[:, 1]), np.unique(samples[:, 3])
        mix = [part.rsplit(":", 1) for part in meta["dataset_mix"].split(",")]
        domains = [name for name, count in mix for _ in range(int(count))]
        return HeadProfile(
            fractions=retained_fractions(
                kept[0].astype(np.int64),
                samples[:, 2].astype(np.int64),
                sinks=int(sinks),
                window=int(window),
            ),
            scorer=str(meta["scorer"]),
            checkpoint=str(meta["model_name"]),
            target=float(meta["base_ratios"][0]),
            sinks=int(sinks),
            window=int(window),
            lengths=samples[:, 2].astype(np.int64),
            domains=tuple(domains),
        )
    except (OSError, ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read as a published profile: {error}.") from error
