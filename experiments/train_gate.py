"""Trains gates that score tokens from hidden states, to give the scores of ``kvzip`` without a second pass.

    python -m experiments.train_gate --config=configs/tangram/train_gate.py

Contexts are scored by ``kvzip`` once; the gates of all layers learn these scores by plain gradient
descent and are judged on contexts of text they have not seen. Written: ``gates.npz``, ``result.json``
and ``train_gate.png``.

Fields of a config: those of ``experiments.head_profile`` that describe model and contexts, and
  samples, test_samples   contexts of each domain to learn from and to judge by.
  epochs                  passes over the contexts, one step each.
  rate                    learning rate.
  rank, gate_sinks        low rank of the gates and learned sinks of each.
  retention               share of the tokens whose choice is compared.
  out                     folder for what is written.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import models
from experiments import flags as shared_flags
from experiments import report
from experiments.head_profile import (
    check_contexts,
    load_with_tokenizer,
    read_texts,
    score_sample,
)
from experiments.retention_model import Context, score_context
from experiments.retention_tasks import Text, make_sample
from experiments.serve import make_console
from kvgrain_jax.budgets.gates import Gate, gate_scores, init_gate, train_step
from kvgrain_jax.budgets.profile import check_retention
from kvgrain_jax.budgets.scores import global_top_k_mask
from kvgrain_jax.engine.model import HiddenAttend
from kvgrain_jax.errors import ConfigError

FIELDS = (
    *("model", "dtype", "domains", "tasks", "context_tokens", "samples", "test_samples", "epochs"),
    *("rate", "rank", "gate_sinks", "retention", "sinks", "window", "seed", "out"),
)
BASELINES = ("snapkv", "expected_attention", "key_norm", "random")


@dataclasses.dataclass(frozen=True)
class Example:
    """A context as gates see it, and what ``kvzip`` makes of it."""

    context: Context
    hidden: Float[Array, "L T d_model"]
    scores: Float[Array, "L K T"]


def train_gate(
    config: Mapping[str, Any], console: rich.console.Console | None = None
) -> list[dict[str, Any]]:
    """Runs a config.

    Returns:
      One row for the trained gates and one for each other scorer that needs no second pass:
      ``scorer`` and ``overlap``, the share of the tokens which ``kvzip`` would keep, all heads
      competing, that it keeps too, on contexts not learned from. The row of the gates also has
      ``losses``, the mean of each epoch.

    Raises:
      ConfigError: the config is wrong, or the loss is not finite.
    """
    console = console or make_console()
    _check(config)
    folder = report.check_out_folder(config["out"])
    with console.status(f"loading {config['model']}"):
        loaded = load_with_tokenizer(config)
        assert loaded.tokenizer is not None
        texts = list(read_texts(config, loaded.tokenizer).values())
    with console.status("scoring contexts to learn from"):
        examples = list(_examples(loaded, texts, config, "profile", config["samples"]))
    gates, losses = _initial(loaded, config), []
    with console.status("training") as status:
        for epoch in range(config["epochs"]):
            found = []
            for example in examples:
                gates, loss = _step(gates, example.hidden, example.scores, config["rate"])
                found.append(float(loss.mean()))
            losses.append(float(np.mean(found)))
            status.update(f"epoch {epoch + 1} of {config['epochs']}: loss {losses[-1]:.4f}")
            if not np.isfinite(losses[-1]):
                raise ConfigError(
                    f"The loss is {losses[-1]} in epoch {epoch + 1}; lower config.rate."
                )
    with console.status("judging"):
        tests = list(_examples(loaded, texts, config, "test", config["test_samples"]))
        rows = _judge(loaded, gates, tests, config)
    rows[0]["losses"] = losses
    weights = {name: np.asarray(value) for name, value in vars(gates).items()}
    with open(folder / "gates.npz", "wb") as file:
        np.savez_compressed(file, allow_pickle=False, checkpoint=loaded.checkpoint, **weights)
    path = report.write_result(folder, "train_gate", config, rows)
    _draw(folder / "train_gate.png", config, rows)
    console.print(
        report.table(
            f"Of the {config['retention']:.0%} that kvzip would keep, also kept by",
            ["scorer", "overlap"],
            [[row["scorer"], f"{row['overlap']:.3f}"] for row in rows],
        )
    )
    console.print(f"Written: {path}")
    return rows


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(
    step: Callable[..., Any], params: Any, tokens: Int[Array, "T"]
) -> Float[Array, "L T d_model"]:
    """What the attention of each layer is given: the residual stream after its norm.

    Args:
      step: of a model, see ``kvgrain_jax.engine.Model``.
      params: its weights.
      tokens: token ids.
    """
    found: list[Array] = []

    def attend(cache, layer, q, k, v, hidden):
        found.append(hidden)
        return models.plain_attend(cache, layer, q, k, v)

    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    step(params, tokens, positions, None, HiddenAttend(attend), rows=jnp.zeros(1, jnp.int32))
    return jnp.stack(found)


def _check(config: Mapping[str, Any]) -> None:
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    check_contexts({**config, "scorer": "kvzip"})
    check_retention(config["retention"])
    for name in ("samples", "test_samples", "epochs", "rank", "gate_sinks"):
        if config[name] < 1:
            raise ConfigError(f"config.{name} is {config[name]}; give at least 1.")
    if not config["rate"] > 0:
        raise ConfigError(f"config.rate is {config['rate']}; give a positive number.")


def _examples(
    loaded: models.LoadedModel,
    texts: Sequence[Text],
    config: Mapping[str, Any],
    half: str,
    samples: int,
) -> Iterator[Example]:
    assert loaded.tokenizer is not None
    for text in texts:
        for i in range(samples):
            task = config["tasks"][i % len(config["tasks"])]
            sample = make_sample(
                task,
                text,
                loaded.tokenizer,
                tokens=config["context_tokens"],
                seed=config["seed"] + i,
                half=half,
            )
            context, scores = score_sample(loaded, sample, "kvzip", config["seed"])
            tokens = jnp.asarray(sample.context, jnp.int32)
            hidden = hidden_states(loaded.model.step, loaded.model.params, tokens)
            yield Example(context, hidden, scores)


def _initial(loaded: models.LoadedModel, config: Mapping[str, Any]) -> Gate:
    model = loaded.model
    layers = [
        init_gate(
            key,
            d_model=loaded.config.d_model,
            n_kv_heads=model.n_kv_heads,
            group=model.n_heads // model.n_kv_heads,
            rank=config["rank"],
            n_sinks=config["gate_sinks"],
        )
        for key in jax.random.split(jax.random.key(config["seed"]), model.n_layers)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


_step = jax.jit(train_step)


def _judge(
    loaded: models.LoadedModel,
    gates: Gate,
    examples: Sequence[Example],
    config: Mapping[str, Any],
) -> list[dict[str, Any]]:
    positions = jnp.arange(config["context_tokens"], dtype=jnp.int32)
    total = round(config["retention"] * examples[0].scores.size)
    found: dict[str, list[float]] = {name: [] for name in ("gate", *BASELINES)}
    for example in examples:
        wanted = global_top_k_mask(example.scores, total)
        for name, overlaps in found.items():
            if name == "gate":
                layers = [
                    jax.tree.map(lambda leaf, i=i: leaf[i], gates) for i in range(len(wanted))
                ]
                scores = jnp.stack(
                    [
                        gate_scores(gate, hidden, k_positions=positions)
                        for gate, hidden in zip(layers, example.hidden, strict=True)
                    ]
                )
            else:
                key = jax.random.key(config["seed"])
                scores = score_context(loaded.model, example.context, name, key=key)
            both = wanted & global_top_k_mask(scores, total)
            overlaps.append(float(both.sum() / total))
    return [
        {"scorer": name, "overlap": float(np.mean(overlaps)), "contexts": len(overlaps)}
        for name, overlaps in found.items()
    ]


def _draw(path: pathlib.Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    loss, overlap = figure.subplots(1, 2)
    losses = rows[0]["losses"]
    loss.plot(range(1, len(losses) + 1), losses, color="#0b4f8a")
    loss.set_xlabel("epoch")
    loss.xaxis.set_major_locator(MaxNLocator(integer=True))
    loss.set_ylabel("binary cross-entropy")
    loss.set_title(
        f"Gates of rank {config['rank']} learn the scores of kvzip", fontsize=11, loc="left"
    )
    overlap.barh(
        [row["scorer"] for row in rows][::-1],
        [row["overlap"] for row in rows][::-1],
        color=["#b8b8b8"] * (len(rows) - 1) + ["#0b4f8a"],
    )
    overlap.set_xlim(0, 1)
    overlap.set_xlabel("share kept too")
    overlap.set_title(
        f"Of the {config['retention']:.0%} that kvzip keeps, text not seen", fontsize=11, loc="left"
    )
    for axis in (loss, overlap):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    shared_flags.run_config(train_gate)
