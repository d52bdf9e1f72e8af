"""How well a model answers from a compressed cache, by method and retention, at equal bytes.

    python -m experiments.retention --config=configs/tangram/retention.py

Each context is computed in full and compressed once, not knowing what will be asked; its questions are
answered by teacher forcing. A question counts as right where every token of the answer is the
model's first choice. Written: ``result.json`` with the figures of each task, domain, method and
retention, paired differences between methods, and 95% intervals (bootstrap over contexts); and
``retention.png``.

Fields of a config: those of ``experiments.head_profile`` that describe model, contexts and scorer,
and
  profile_samples         contexts of each domain that the profiles are measured on; their text and
                          their facts differ from those that are asked about.
  samples                 contexts of each task and domain.
  methods                 names, see ``experiments.retention_methods``.
  retentions              shares of the tokens kept; ``full`` (everything) is always measured.
  page_size, group_size   tokens of a page and heads of a group, ``G_h``.
  out                     folder for ``result.json`` and ``retention.png``.
"""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

import models
from experiments import flags as shared_flags
from experiments import report
from experiments.head_profile import (
    check_contexts,
    load_with_tokenizer,
    profile_contexts,
    read_texts,
    score_sample,
)
from experiments.retention_methods import METHODS, Case, Spending, keep_tokens
from experiments.retention_model import answer_questions, pack_questions, score_context
from experiments.retention_picture import draw_retention
from experiments.retention_statistics import FULL, Answer, compare, summarise
from experiments.retention_tasks import TASKS, Sample, Text, make_sample
from experiments.serve import make_console
from kvgrain_jax.budgets import HeadProfile, make_groups
from kvgrain_jax.budgets.profile import check_retention
from kvgrain_jax.errors import ConfigError

FIELDS = (
    *("model", "dtype", "domains", "tasks", "context_tokens", "scorer", "sinks", "window", "seed"),
    *("profile_samples", "samples", "methods", "retentions", "page_size", "group_size", "out"),
)
# (a, b): whether a answers better than b at the same retention.
COMPARISONS = (
    ("static", "uniform"),
    ("static", "dynamic"),
    ("static", "static_margin"),
    ("static", "static_crossed"),
    ("static", "permuted"),
    ("static", "random"),
)
Profiles = Mapping[float, HeadProfile]


def retention(
    config: Mapping[str, Any], console: rich.console.Console | None = None
) -> list[dict[str, Any]]:
    """Runs a config. Results are written after each round over tasks and domains, so an interrupted
    run leaves those of the rounds that it finished.

    Returns:
      The rows of ``experiments.retention_statistics.summarise``.

    Raises:
      ConfigError: the config is wrong; found out before anything is computed.
    """
    console = console or make_console()
    spending = check_config(config)
    folder = report.check_out_folder(config["out"])
    begin = time.perf_counter()
    with console.status(f"loading {config['model']}"):
        loaded = load_with_tokenizer(config)
        assert loaded.tokenizer is not None
        texts = read_texts(config, loaded.tokenizer)
    # A group size that does not divide the heads is found out now.
    make_groups(np.ones((loaded.model.n_layers, loaded.model.n_kv_heads)), config["group_size"])
    with console.status("profiling") as status:
        profiles = _profiles(loaded, texts, config, status)
    answers: list[Answer] = []
    rows: list[dict[str, Any]] = []
    with console.status("asking") as status:
        for round_ in range(config["samples"]):
            for domain, text in texts.items():
                for task in config["tasks"]:
                    status.update(f"round {round_ + 1} of {config['samples']}: {task}, {domain}")
                    seed = config["seed"] + round_
                    sample = make_sample(
                        task,
                        text,
                        loaded.tokenizer,
                        tokens=config["context_tokens"],
                        seed=seed,
                        half="test",
                    )
                    answers += _ask(loaded, sample, profiles, spending, config, seed)
            seconds = time.perf_counter() - begin
            rows = _write(folder, config, answers, seconds)
    console.print(*_tables(rows, config))
    console.print(f"Written: {folder / 'result.json'}")
    return rows


def check_config(config: Mapping[str, Any]) -> Spending:
    """Checks a config.

    Raises:
      ConfigError: a field is missing, unknown or out of range.
    """
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    check_contexts(config)
    for name in ("profile_samples", "samples", "page_size", "group_size"):
        if config[name] < 1:
            raise ConfigError(f"config.{name} is {config[name]}; give at least 1.")
    for name, known in (("methods", METHODS), ("tasks", TASKS)):
        if unknown := [value for value in config[name] if value not in known]:
            raise ConfigError(
                f"config.{name} holds {', '.join(unknown)}; choose among {', '.join(known)}."
            )
    spending = Spending(
        config["page_size"], config["group_size"], config["sinks"], config["window"]
    )
    for value in config["retentions"]:
        check_retention(value, "A retention of config.retentions")
        spending.pages_per_group(config["context_tokens"], value)
    return spending


def _profiles(
    loaded: models.LoadedModel, texts: Mapping[str, Text], config: Mapping[str, Any], status: Any
) -> Profiles:
    found: Profiles = {}
    total = config["profile_samples"] * len(texts)
    steps = profile_contexts(
        loaded,
        list(texts.values()),
        config,
        samples=config["profile_samples"],
        targets=tuple(config["retentions"]),
    )
    for done, step in enumerate(steps, 1):
        status.update(f"profiled {done} of {total} contexts")
        found = step or found
    return found


def _ask(
    loaded: models.LoadedModel,
    sample: Sample,
    profiles: Profiles,
    spending: Spending,
    config: Mapping[str, Any],
    seed: int,
) -> list[Answer]:
    """Answers of one context from the full cache and from every compressed one."""
    context, scores = score_sample(loaded, sample, config["scorer"], seed)
    random = score_context(loaded.model, context, "random", key=jax.random.key(seed))
    questions = pack_questions([(q.prompt, q.answer) for q in sample.questions])
    domains = list(config["domains"])
    other = domains[(domains.index(sample.domain) + 1) % len(domains)]
    where = (sample.task, sample.domain, seed)

    def ask(methods: Sequence[str], share: float, keep: Sequence[jax.Array]) -> list[Answer]:
        logprob, right = answer_questions(loaded.model, context, jnp.stack(keep), questions)
        return [
            Answer(*where, method, share, float(ok.mean()), float(-found.mean()), len(ok))
            for method, found, ok in zip(methods, logprob, right, strict=True)
        ]

    answers = ask([FULL], 1.0, [jnp.ones(scores.shape, bool)])
    for share, profile in profiles.items():
        if share == 1:
            # Every method keeps everything.
            answers += [dataclasses.replace(answers[0], method=name) for name in config["methods"]]
            continue
        case = Case(
            scores=scores,
            random=random,
            retention=share,
            own=profile.of_domain(sample.domain),
            other=profile.of_domain(other),
            spending=spending,
        )
        keep = [keep_tokens(method, case) for method in config["methods"]]
        answers += ask(config["methods"], share, keep)
    return answers


def _write(
    folder: pathlib.Path, config: Mapping[str, Any], answers: list[Answer], seconds: float
) -> list[dict[str, Any]]:
    rows = summarise(answers)
    comparisons = compare(answers, COMPARISONS)
    report.write_result(
        folder, "retention", config, rows, comparisons=comparisons, seconds=round(seconds)
    )
    draw_retention(folder / "retention.png", config, rows)
    return rows


def _tables(rows: list[dict[str, Any]], config: Mapping[str, Any]):
    shares = [share for share in config["retentions"] if share < 1]
    for task, key, title, form in (
        ("retrieval", "accuracy", "questions answered right, all retrieval tasks", ".2f"),
        ("perplexity", "nll_added", "nats a token of real text, more than the full cache", ".3f"),
    ):
        found = {
            (row["method"], row["retention"]): row
            for row in rows
            if row["task"] == task and row["domain"] == "all"
        }
        if not found:
            continue
        yield report.table(
            f"{config['model']}: {title} (full cache {found[FULL, 1.0][key]:{form}})",
            ["method", *(f"{share:g} kept" for share in shares)],
            [
                [
                    method,
                    *(
                        "{:{f}} [{:{f}}, {:{f}}]".format(
                            *(found[method, share][key + end] for end in ("", "_low", "_high")),
                            f=form,
                        )
                        for share in shares
                    ),
                ]
                for method in config["methods"]
            ],
        )


if __name__ == "__main__":
    shared_flags.run_config(retention)
