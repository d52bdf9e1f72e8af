"""Workloads of a table's cells: enters a cell, leaves its requests, the same for every variant.

Fields of a cell that is served (``how`` ``poisson`` or ``burst``):
  prefix_tokens   length of the shared prefix; several lengths are as many prefixes, interleaved.
  classes         how many distinct prefixes of that length; 1 where it is not given.
  batch           rows of the batch.
  turns           lengths of what follows the prefix, see ``experiments.table_turns``.
  output_tokens   tokens to generate; there is no stop token, so each request generates all of them.
  requests, rate  of the Poisson process, in all and per second.
  seed            of lengths, tokens and arrivals; a repetition adds its number.
  levels          instead of one prefix, a path of shared texts: ``(tokens, distinct)`` of each level,
                  0 distinct texts being one for each request.
  sharing         ``nested`` (texts are shared level by level) or ``flat`` (every path is a text of its
                  own, with nothing in common with another).
A cell that is replayed has ``trace``, the name of an entry of ``traces``: the fields of
``workload_specs.Trace``.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments import table_turns
from experiments.report import plain
from experiments.trace_records import synthetic_tokens
from experiments.workloads import Target, Workload, prepare
from kvgrain_jax.engine import Request


def prepare_cell(cell: Mapping[str, Any], repetition: int) -> Callable[[Target], Workload]:
    """Checks what a cell asks for and reads its files; the function it returns makes the requests.

    Raises:
      ConfigError: a field is wrong or a file cannot be used.
    """
    if cell["how"] == "replay":
        return _read_once(json.dumps(plain({"kind": "trace", **cell["traces"]})))
    if "levels" in cell:
        return lambda target: _levels(cell, repetition, target)
    count = cell["batch"] if cell["how"] == "burst" else cell["requests"]
    seed = cell["seed"] + repetition
    return prepare(
        {
            "kind": "synthetic",
            "requests": count,
            "prefix_tokens": prefixes(cell),
            "suffix_tokens": table_turns.draw(cell["turns"], count, seed),
            "output_tokens": cell["output_tokens"],
            "arrivals": "poisson" if cell["how"] == "poisson" else "burst",
            "rate": cell.get("rate", 1.0),
            "seed": seed,
        }
    )


def prefixes(cell: Mapping[str, Any]) -> tuple[int, ...]:
    """Length of each of a cell's prefixes."""
    lengths = cell["prefix_tokens"]
    return (lengths,) * cell.get("classes", 1) if isinstance(lengths, int) else tuple(lengths)


@functools.lru_cache(maxsize=4)
def _read_once(spec: str) -> Callable[[Target], Workload]:
    return prepare(json.loads(spec))


def _levels(cell: Mapping[str, Any], repetition: int, target: Target) -> Workload:
    seed = cell["seed"] + repetition
    turns = table_turns.draw(cell["turns"], cell["batch"], seed)
    requests = []
    for index, turn in enumerate(turns):
        own = [index % distinct if distinct else index for _, distinct in cell["levels"]]
        path = "" if cell["sharing"] == "nested" else f"/{own}"
        texts = [
            synthetic_tokens(f"{seed}/{level}/{which}{path}", 0, tokens, target.vocabulary)
            for level, ((tokens, _), which) in enumerate(zip(cell["levels"], own, strict=True))
        ]
        shared = sum(len(text) for text in texts)
        texts.append(synthetic_tokens(f"{seed}/turn/{index}", 0, turn, target.vocabulary))
        requests.append(
            Request(
                f"r{index}",
                np.concatenate(texts),
                max_new_tokens=cell["output_tokens"],
                shared_tokens=shared,
            )
        )
    return Workload(tuple(requests), {r.id: cell["sharing"] for r in requests}, {"kind": "levels"})
