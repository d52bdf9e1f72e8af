"""The ``head_profile`` and ``train_gate`` binaries on a tiny model, and published profiles."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tiny_text_model import load_tiny_text_model

from configs.tangram import head_profile as head_profile_config
from configs.tangram import published_profiles
from configs.tangram import train_gate as train_gate_config
from experiments import head_profile as binary
from experiments.head_profile import head_profile, kept_by_all
from experiments.head_stability import read_published, stability
from experiments.train_gate import hidden_states, train_gate
from kvgrain_jax.budgets import HeadProfile, check_profile, load_profile
from kvgrain_jax.budgets.gates import read_gates
from kvgrain_jax.errors import ConfigError

TINY = {"model": "random:tiny", "tasks": ("multi_needle", "perplexity"), "context_tokens": 256}


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    monkeypatch.setattr(binary.models, "load", load_tiny_text_model)


def run(main, config):
    output = io.StringIO()
    return main(config, rich.console.Console(file=output, width=120)), output.getvalue()


def profile_config(out, **changes):
    config = head_profile_config.get_config().to_dict()
    return config | TINY | {"samples": 2, "out": str(out)} | changes


def published_file(path, kept, *, length=1000, sinks=10, window=90):
    """A file as the authors' tool writes it, of two data sets."""
    n = kept.shape[0]
    meta = {
        "model_name": "some/model",
        "scorer": "snapkv",
        "base_ratios": [0.3],
        "dataset_mix": f"books:{n - n // 2},code:{n // 2}",
    }
    np.savez(
        path,
        raw_kept=kept[None].astype(np.int32),
        sample_meta=np.tile(np.array([length - sinks, sinks, length, window], np.int32), (n, 1)),
        meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
    )


def test_a_measured_profile_is_of_the_model_and_the_target(tmp_path):
    rows, printed = run(head_profile, profile_config(tmp_path, targets=(0.5,)))
    loaded = load_tiny_text_model()
    profile = load_profile(tmp_path / "profile_0.5.npz")
    check_profile(profile, checkpoint=loaded.checkpoint, n_layers=2, n_kv_heads=2)
    assert profile.domains == ("code", "code", "prose", "prose")
    # All heads together keep half of the tokens of every context.
    kept = 32 + profile.fractions * (256 - 32)
    np.testing.assert_allclose(kept.mean(axis=(1, 2)), 128)
    assert [row["profile"] for row in rows] == ["profile_0.5"]
    assert "uniform" in printed
    assert (tmp_path / "profile_0.5.png").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "result.json").read_text())["rows"]) == 1


def test_heads_that_score_higher_keep_more():
    scores = jnp.stack([jnp.full((1, 40), 0.1), jnp.full((1, 40), 0.9)])
    kept = kept_by_all(scores, 0.5, sinks=2, window=2)
    # 40 of 80 places: the second layer's 40 tokens and the 4 protected of the first, less 4.
    np.testing.assert_array_equal(kept, [[4], [36]])


def test_published_profiles_are_analysed_without_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(binary.models, "load", None)
    kept = np.random.default_rng(0).integers(100, 1000, (1, 3, 4)).repeat(6, axis=0)
    published_file(tmp_path / "a.npz", kept)
    config = published_profiles.get_config().to_dict()
    config |= {"published": {"mine": str(tmp_path / "a.npz")}, "out": str(tmp_path)}
    rows, _ = run(head_profile, config)
    assert rows[0]["halves_mean"] == pytest.approx(1.0)
    assert rows[0]["domains"] == {"books, code": pytest.approx(1.0)}
    assert (tmp_path / "mine.png").exists()


def test_a_published_fraction_is_of_the_unprotected_tokens(tmp_path):
    published_file(tmp_path / "a.npz", np.array([[[100, 550, 1000]]]).repeat(2, axis=0))
    profile = read_published(tmp_path / "a.npz")
    np.testing.assert_allclose(profile.fractions, [[[0.0, 0.5, 1.0]]] * 2)
    assert (profile.sinks, profile.window, profile.target) == (10, 90, 0.3)
    assert profile.domains == ("books", "code")


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_a_published_file_that_cannot_be_read_is_an_error(tmp_path, content):
    path = tmp_path / "a.npz"
    if content is None:
        np.savez(path, raw_kept=np.zeros(3))
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.npz cannot be read as a published profile"):
        read_published(path)


def test_the_rules_cover_what_heads_demand_or_say_how_much_they_do_not():
    # Two heads that always ask for 0.1 and 0.5 of 900 tokens: 690 of them, 345 each where uniform.
    profile = HeadProfile(
        fractions=np.array([[[0.1, 0.5]]]).repeat(4, axis=0),
        scorer="kvzip",
        checkpoint="tiny",
        target=0.37,
        sinks=10,
        window=90,
        lengths=np.full(4, 1000),
        domains=("prose",) * 4,
    )
    rules = stability(profile, alpha=2.0, seed=0)["rules"]
    assert rules["mean"]["uncovered"] == 0
    assert rules["mean, equal bytes"]["uncovered"] == 0
    assert rules["mean, equal bytes"]["bytes"] == 1
    # Uniform budgets give each 270 unprotected tokens; the second head asks for 450 of 540.
    assert rules["uniform"]["uncovered"] == pytest.approx(180 / 540)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 1}, "config.samples is 1"),
        ({"scorer": "h2o"}, "no scorer 'h2o'"),
        ({"targets": (0.0,)}, "is 0.0"),
        ({"speed": 1}, "check speed"),
    ],
)
def test_what_cannot_be_profiled_is_an_error(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(head_profile, profile_config(tmp_path, **changes))


def gate_config(out, **changes):
    config = train_gate_config.get_config().to_dict()
    few = {"samples": 1, "test_samples": 1, "epochs": 12, "rank": 4, "gate_sinks": 2}
    return config | TINY | few | {"out": str(out)} | changes


@pytest.mark.slow
def test_gates_learn_and_are_compared(tmp_path):
    rows, _ = run(train_gate, gate_config(tmp_path))
    assert [row["scorer"] for row in rows][:2] == ["gate", "snapkv"]
    assert rows[0]["losses"][-1] < rows[0]["losses"][0]
    assert all(0 <= row["overlap"] <= 1 for row in rows)
    gates = read_gates(tmp_path / "gates.npz", checkpoint=load_tiny_text_model().checkpoint)
    assert gates.query.shape == (2, 2, 3, 4, 64)  # L, K, G, rank, d_model
    assert (tmp_path / "train_gate.png").stat().st_size > 10_000


def test_hidden_states_are_what_the_first_attention_is_given():
    loaded = load_tiny_text_model()
    tokens = jnp.array([3, 1, 2], jnp.int32)
    found = hidden_states(loaded.model.step, loaded.model.params, tokens)
    assert found.shape == (2, 3, 64)
    embedded = np.asarray(loaded.model.params["embedding"])[np.asarray(tokens)]
    norm = embedded / np.sqrt((embedded**2).mean(axis=-1, keepdims=True) + loaded.config.eps)
    weight = np.asarray(loaded.model.params["layers.0.attention_norm.weight"])
    np.testing.assert_allclose(found[0], norm * weight, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "config.epochs is 0"),
        ({"rate": 0.0}, "config.rate is 0.0"),
        ({"retention": 2.0}, "retention is 2.0"),
        ({"speed": 1}, "check speed"),
    ],
)
def test_gates_that_cannot_be_trained_are_errors(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(train_gate, gate_config(tmp_path, **changes))
