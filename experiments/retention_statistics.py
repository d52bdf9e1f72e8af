"""Means, paired differences and their 95% intervals, from the answers of single contexts.

Intervals are percentiles of a bootstrap that draws contexts anew within each task and domain; the
questions of one context are not independent, so they stay together.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.retention_tasks import PERPLEXITY

FULL = "full"
RETRIEVAL = "retrieval"  # all tasks but perplexity
DRAWS = 2000
FIGURES = ("accuracy", "nll")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one method made of one context.

    Attributes:
      task: of the context.
      domain: of its text.
      seed: of the context.
      method: how the cache was compressed.
      retention: share of the tokens kept.
      accuracy: share of its questions answered right.
      nll: negative log-likelihood of the answers, nats a token.
      questions: how many.
    """

    task: str
    domain: str
    seed: int
    method: str
    retention: float
    accuracy: float
    nll: float
    questions: int


def summarise(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Figures of every method and retention.

    Returns:
      One row for each task, for all retrieval tasks together, and for those and perplexity in each
      domain: ``task``, ``domain`` (or ``all``), ``method``, ``retention``, ``contexts``, ``questions``,
      and, with ``_low`` and ``_high``, ``accuracy``, ``nll`` and ``nll_added``, which is ``nll`` less that of the full
      cache on the same context.
    """
    full = {_context(answer): answer.nll for answer in answers if answer.method == FULL}
    cells: dict[tuple, list[Answer]] = collections.defaultdict(list)
    for answer in answers:
        tasks = _tasks(answer)
        for task, domain in (*((task, "all") for task in tasks), (tasks[-1], answer.domain)):
            cells[task, domain, answer.method, answer.retention].append(answer)
    names = ("task", "domain", "method", "retention")
    rows = []
    for place, found in cells.items():
        row = dict(zip(names, place, strict=True))
        row |= {"contexts": len(found), "questions": sum(answer.questions for answer in found)}
        for figure in FIGURES:
            row |= _interval(figure, found, [getattr(answer, figure) for answer in found])
        added = [answer.nll - full[_context(answer)] for answer in found]
        row |= _interval("nll_added", found, added)
        rows.append(row)
    return rows


def compare(answers: Sequence[Answer], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Differences between two methods on the same contexts.

    Returns:
      For each pair ``(a, b)`` whose methods ran, task and retention below 1: ``accuracy`` and ``nll``
      of ``a`` minus those of ``b``, with ``_low`` and ``_high``.
    """
    by_method: dict[str, dict[tuple, Answer]] = collections.defaultdict(dict)
    for answer in answers:
        by_method[answer.method][answer.retention, _context(answer)] = answer
    rows = []
    for a, b in pairs:
        cells: dict[tuple, list[tuple[Answer, Answer]]] = collections.defaultdict(list)
        for place in by_method[a].keys() & by_method[b].keys():
            answer = by_method[a][place]
            for task in _tasks(answer) if answer.retention < 1 else ():
                cells[task, answer.retention].append((answer, by_method[b][place]))
        for (task, share), found in sorted(cells.items()):
            row: dict[str, Any] = {"a": a, "b": b, "task": task, "retention": share}
            for figure in FIGURES:
                differences = [getattr(x, figure) - getattr(y, figure) for x, y in found]
                row |= _interval(figure, [x for x, _ in found], differences)
            rows.append(row)
    return rows


def _context(answer: Answer) -> tuple[str, str, int]:
    return answer.task, answer.domain, answer.seed


def _tasks(answer: Answer) -> tuple[str, ...]:
    return (answer.task,) if answer.task == PERPLEXITY else (answer.task, RETRIEVAL)


def _interval(name: str, answers: Sequence[Answer], values: Sequence[float]) -> dict[str, float]:
    """Mean over tasks and domains of their mean values, and its interval."""
    strata: dict[tuple, list[float]] = collections.defaultdict(list)
    for answer, value in zip(answers, values, strict=True):
        strata[answer.task, answer.domain].append(value)
    rng = np.random.default_rng(0)
    means, draws = [], []
    for stratum in map(np.array, strata.values()):
        means.append(stratum.mean())
        drawn = rng.integers(len(stratum), size=(DRAWS, len(stratum)))
        draws.append(stratum[drawn].mean(axis=1))
    low, high = np.percentile(np.mean(draws, axis=0), [2.5, 97.5])
    return {name: float(np.mean(means)), f"{name}_low": float(low), f"{name}_high": float(high)}
