"""Measures how much of a context each KV head demands, and whether that is a property of the model.

    python -m experiments.head_profile --config=configs/tangram/head_profile.py

Contexts of several domains are scored; all heads of all layers compete for ``target`` of the tokens
(sinks and window protected), and what each head got is a sample of its profile. Written: one
``profile_<target>.npz`` for each target, ``result.json`` with the stability figures, and for the
first target the heat map and box plots of the paper's Figures 2(a) and 6. With ``published``, profile files
that others measured are analysed instead, and no model is loaded.

Fields of a config:
  model, dtype            as in ``experiments.serve``.
  domains                 name to text: ``prose`` and ``code`` of Python's library, or a file.
  tasks                   kinds of contexts, see ``experiments.retention_tasks``.
  context_tokens          length of the contexts.
  samples                 contexts of each domain.
  scorer                  see ``kvgrain_jax.budgets.scores``.
  targets                 retentions, each in (0, 1].
  sinks, window           protected tokens at the front and at the end.
  alpha                   margin of the budget rules that are compared.
  seed                    of the contexts.
  published               name to path of an npz with ``raw_kept``, ``sample_meta`` and ``meta``.
  out                     folder for what is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jaxtyping import Array, Float

import models
from experiments import flags as shared_flags
from experiments import report
from experiments.head_profile_picture import draw_profile
from experiments.head_stability import read_published, stability
from experiments.retention_model import Context, read_context, score_context
from experiments.retention_tasks import Sample, Text, make_sample, read_text
from experiments.serve import make_console
from kvgrain_jax.budgets import (
    HeadProfile,
    retained_fractions,
    save_profile,
    tokens_per_head,
)
from kvgrain_jax.budgets.scores import SCORERS, global_top_k_mask, protect
from kvgrain_jax.errors import ConfigError

FIELDS = (
    *("model", "dtype", "domains", "tasks", "context_tokens", "samples", "scorer", "targets"),
    *("sinks", "window", "alpha", "seed", "published", "out"),
)
REPEAT = "\n\nRepeat the previous context exactly.\n\n"


def head_profile(
    config: Mapping[str, Any], console: rich.console.Console | None = None
) -> list[dict[str, Any]]:
    """Runs a config.

    Returns:
      One row for each profile: its name and the figures of ``experiments.head_stability``.

    Raises:
      ConfigError: the config is wrong, or a profile file cannot be read.
    """
    console = console or make_console()
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    folder = report.check_out_folder(config["out"])
    if paths := config["published"]:
        profiles = {name: read_published(path) for name, path in paths.items()}
    else:
        profiles = _measure(config, console)
        for name, profile in profiles.items():
            save_profile(profile, folder / f"{name}.npz")
    rows = [
        {"profile": name, **stability(profile, alpha=config["alpha"], seed=config["seed"])}
        for name, profile in profiles.items()
    ]
    path = report.write_result(folder, "head_profile", config, rows)
    console.print(*_tables(rows))
    for name, profile in profiles.items():
        draw_profile(folder / f"{name}.png", _title(profile), profile)
    console.print(f"Written: {path}")
    return rows


def check_contexts(config: Mapping[str, Any]) -> None:
    """Checks the fields that ``retention`` shares.

    Raises:
      ConfigError: a scorer or size that cannot be.
    """
    if config["scorer"] not in SCORERS:
        raise ConfigError(
            f"There is no scorer {config['scorer']!r}; choose one of {', '.join(SCORERS)}."
        )
    if config["context_tokens"] <= config["sinks"] + config["window"]:
        raise ConfigError(
            f"config.context_tokens is {config['context_tokens']}, and {config['sinks']} sinks and a "
            f"window of {config['window']} are protected; give longer contexts."
        )
    for name in ("domains", "tasks"):
        if not config[name]:
            raise ConfigError(f"config.{name} is empty; give at least one.")


def load_with_tokenizer(config: Mapping[str, Any]) -> models.LoadedModel:
    """Loads the model of a config.

    Raises:
      ConfigError: it has no tokenizer, or its context is too short.
    """
    loaded = models.load(config["model"], dtype=config["dtype"])
    if loaded.tokenizer is None:
        raise ConfigError(f"{config['model']} has no tokenizer, and contexts are made of text.")
    needed = 3 * config["context_tokens"]  # context, repetition, and room for questions
    if needed > loaded.model.max_context:
        raise ConfigError(
            f"Contexts of {config['context_tokens']} tokens need a model of {needed}, "
            f"{config['model']} has {loaded.model.max_context}; shorten context_tokens."
        )
    return loaded


def read_texts(config: Mapping[str, Any], tokenizer: models.Tokenizer) -> dict[str, Text]:
    """The texts of all domains."""
    return {name: read_text(name, source, tokenizer) for name, source in config["domains"].items()}


def score_sample(
    loaded: models.LoadedModel, sample: Sample, scorer: str, seed: int
) -> tuple[Context, Float[Array, "L K T"]]:
    """Reads a context and scores its tokens."""
    assert loaded.tokenizer is not None
    request = loaded.tokenizer.encode(REPEAT, bos=False)
    context = read_context(loaded.model, jnp.asarray(sample.context, jnp.int32))
    scores = score_context(
        loaded.model,
        context,
        scorer,
        repetition=jnp.asarray([*request, *sample.context], jnp.int32),
        key=jax.random.key(seed),
    )
    return context, scores


def kept_by_all(
    scores: Float[Array, "L K T"], retention: float, *, sinks: int, window: int
) -> np.ndarray:
    """Tokens that each head keeps, ``[L, K]``, where all compete for equal places on average."""
    n_tokens = scores.shape[-1]
    positions = jnp.arange(n_tokens, dtype=jnp.int32)
    protected = protect(scores, positions, n_tokens, sinks=sinks, window=window)
    each = tokens_per_head(n_tokens, retention, sinks + window)
    kept = global_top_k_mask(protected, each * scores.shape[0] * scores.shape[1])
    return np.asarray(kept.sum(axis=-1))


def profile_contexts(
    loaded: models.LoadedModel,
    texts: Sequence[Text],
    config: Mapping[str, Any],
    *,
    samples: int,
    targets: Sequence[float],
) -> Iterator[dict[float, HeadProfile] | None]:
    """Scores ``samples`` contexts of each text; yields None after each, then the profiles."""
    assert loaded.tokenizer is not None
    kept: dict[float, list[np.ndarray]] = {target: [] for target in targets}
    domains = []
    for text in texts:
        for i in range(samples):
            sample = make_sample(
                config["tasks"][i % len(config["tasks"])],
                text,
                loaded.tokenizer,
                tokens=config["context_tokens"],
                seed=config["seed"] + i,
                half="profile",
            )
            _, scores = score_sample(loaded, sample, config["scorer"], config["seed"] + i)
            for target, found in kept.items():
                found.append(
                    kept_by_all(scores, target, sinks=config["sinks"], window=config["window"])
                )
            domains.append(text.domain)
            yield None
    lengths = np.full(len(domains), config["context_tokens"])
    yield {
        target: HeadProfile(
            fractions=retained_fractions(
                np.stack(found), lengths, sinks=config["sinks"], window=config["window"]
            ),
            scorer=config["scorer"],
            checkpoint=loaded.checkpoint,
            target=target,
            sinks=config["sinks"],
            window=config["window"],
            lengths=lengths,
            domains=tuple(domains),
        )
        for target, found in kept.items()
    }


def _measure(config: Mapping[str, Any], console: rich.console.Console) -> dict[str, HeadProfile]:
    check_contexts(config)
    if config["samples"] < 2:
        raise ConfigError(f"config.samples is {config['samples']}; stability needs at least 2.")
    with console.status(f"loading {config['model']}"):
        loaded = load_with_tokenizer(config)
        assert loaded.tokenizer is not None
        texts = read_texts(config, loaded.tokenizer)
    found: dict[float, HeadProfile] = {}
    total = config["samples"] * len(texts)
    steps = profile_contexts(
        loaded,
        list(texts.values()),
        config,
        samples=config["samples"],
        targets=tuple(config["targets"]),
    )
    with console.status("scoring") as status:
        for done, step in enumerate(steps, 1):
            status.update(f"scored {done} of {total} contexts")
            found = step or found
    return {f"profile_{target:g}": profile for target, profile in found.items()}


def _title(profile: HeadProfile) -> str:
    return (
        f"{profile.checkpoint}: {profile.scorer}, {profile.target:.0%} retained, "
        f"{len(profile.fractions)} contexts"
    )


def _tables(rows: list[dict[str, Any]]):
    yield report.table(
        "Ranking of the heads",
        ["profile", "halves (lowest)", "domains", "std between heads", "std within a head"],
        [
            [
                row["profile"],
                f"{row['halves_mean']:.3f} ({row['halves_min']:.3f})",
                ", ".join(f"{value:.3f}" for value in row["domains"].values()) or "-",
                f"{row['std_between_heads']:.3f}",
                f"{row['std_within_head']:.3f}",
            ]
            for row in rows
        ],
    )
    yield report.table(
        "Demanded tokens left uncovered on samples that the rule has not seen",
        ["budgets", *(f"{row['profile']} (bytes)" for row in rows)],
        [
            [
                rule,
                *(
                    f"{row['rules'][rule]['uncovered']:.1%} ({row['rules'][rule]['bytes']:.2f}x)"
                    for row in rows
                ),
            ]
            for rule in rows[0]["rules"]
        ],
    )


if __name__ == "__main__":
    shared_flags.run_config(head_profile)
