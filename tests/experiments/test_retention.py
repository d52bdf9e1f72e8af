"""The ``retention`` binary on a tiny model with random weights."""

import io
import json

import pytest
import rich.console
from tiny_text_model import load_tiny_text_model

from configs.tangram import retention as retention_config
from experiments import head_profile
from experiments.retention import retention
from experiments.retention_methods import METHODS
from experiments.retention_statistics import RETRIEVAL
from kvgrain_jax.errors import ConfigError


def tiny_config(out, **changes):
    small = {
        "model": "random:tiny",
        "tasks": ("multi_needle", "perplexity"),
        "context_tokens": 320,
        "profile_samples": 2,
        "samples": 1,
        "retentions": (1.0, 0.25),
        "group_size": 2,
        "page_size": 16,
        "out": str(out),
    }
    return retention_config.get_config().to_dict() | small | changes


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    monkeypatch.setattr(head_profile.models, "load", load_tiny_text_model)


def run(config):
    output = io.StringIO()
    return retention(config, rich.console.Console(file=output, width=160)), output.getvalue()


@pytest.mark.slow
def test_every_method_answers_at_every_retention(tmp_path):
    rows, printed = run(tiny_config(tmp_path))
    found = {(row["method"], row["retention"]) for row in rows}
    assert found == {(m, r) for m in METHODS for r in (1.0, 0.25)} | {("full", 1.0)}
    assert {row["task"] for row in rows} == {"multi_needle", "perplexity", RETRIEVAL}
    assert {row["domain"] for row in rows} == {"prose", "code", "all"}
    for row in rows:
        assert row["nll_low"] <= row["nll"] <= row["nll_high"]
        assert 0 <= row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] <= 1
    # Random weights guess among 512 tokens, nearly all alike.
    assert all(4 < row["nll"] < 9 for row in rows)
    assert "static" in printed
    assert "0.25 kept" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["rows"]) == len(rows)
    pairs = {(row["a"], row["b"]) for row in result["comparisons"]}
    assert {("static", "uniform"), ("static", "dynamic")} <= pairs
    assert (tmp_path / "retention.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 1}, "check speed"),
        ({"samples": 0}, "config.samples is 0"),
        ({"methods": ("static", "magic")}, "config.methods holds magic"),
        ({"tasks": ("haystack",)}, "config.tasks holds haystack"),
        ({"tasks": ()}, "config.tasks is empty"),
        ({"scorer": "h2o"}, "no scorer 'h2o'"),
        ({"retentions": (0.5, 0.0)}, "config.retentions is 0.0"),
        ({"retentions": (0.5, 1.5)}, "config.retentions is 1.5"),
        ({"retentions": (0.05,)}, "2 are protected"),
        ({"context_tokens": 32}, "4 sinks and a window of 28 are protected"),
        ({"context_tokens": 4000}, "shorten context_tokens"),
        ({"domains": {"prose": "/no/such/file"}}, "cannot be read"),
        ({"group_size": 3}, "G_h is 3, which does not divide the 4 heads"),
    ],
)
def test_what_cannot_be_run_is_an_error(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(tmp_path, **changes))


def test_a_model_without_a_tokenizer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no tokenizer"):
        run(tiny_config(tmp_path))
