"""The engine with learned gates: what stays, and gates that do not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_head_engine import CONFIG, MODEL, SINKS, WINDOW, ask, budgets, held_tokens, make_engine

from kvgrain_jax import ConfigError
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.gates import Gate, gate_scores, init_gate, read_gates

PROMPT = np.random.default_rng(4).permutation(CONFIG.vocabulary)[:53]
SCORER = ChunkScorer("gates")
SIZES = {"d_model": CONFIG.d_model, "n_kv_heads": CONFIG.kv_heads, "group": 2}


@functools.cache
def make_gates(**sizes) -> Gate:
    keys = jax.random.split(jax.random.key(8), CONFIG.layers)
    return jax.vmap(lambda key: init_gate(key, rank=4, n_sinks=2, **(SIZES | sizes)))(keys)


def test_each_head_keeps_the_tokens_that_its_gate_likes_best():
    gates = make_gates()
    engine = make_engine(0.4, scorer=SCORER, gates=gates)
    engine.submit(ask("r", PROMPT, 6))
    while engine.scheduler.next_prompt() is not None or engine.scheduler.waiting:
        engine.prefill()
    # The first layer's hidden states are the embeddings, normalised.
    embedded = np.asarray(MODEL.params["embedding"], np.float64)[PROMPT]
    norm = embedded / np.sqrt((embedded**2).mean(axis=1, keepdims=True) + CONFIG.eps)
    hidden = norm * np.asarray(MODEL.params["layers.0.attention_norm.weight"])
    first = jax.tree.map(lambda x: x[0], gates)
    positions = jnp.arange(PROMPT.size, dtype=jnp.int32)
    scores = np.array(gate_scores(first, jnp.asarray(hidden, jnp.float32), k_positions=positions))
    scores[:, :SINKS] = scores[:, -WINDOW:] = np.inf
    budget, held = budgets(0.4).budgets(PROMPT.size), held_tokens(engine)
    for head in range(CONFIG.kv_heads):
        best = np.argsort(-scores[head], kind="stable")[: budget[0, head]]
        assert sorted(held[0, head]) == sorted(best.tolist())


def test_gates_from_a_file_are_those_that_were_written(tmp_path):
    gates, path = make_gates(), tmp_path / "gates.npz"
    weights = {name: np.asarray(value) for name, value in vars(gates).items()}
    np.savez(path, allow_pickle=False, checkpoint="tiny", **weights)
    found = read_gates(path, checkpoint="tiny")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gates), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ConfigError, match="were trained on tiny, the model is other"):
        read_gates(path, checkpoint="other")


@pytest.mark.parametrize("content", [None, b"not an archive"])
def test_a_file_without_gates_is_an_error(tmp_path, content):
    path = tmp_path / "gates.npz"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="No gates can be read"):
        read_gates(path, checkpoint="tiny")


@pytest.mark.parametrize(
    ("scorer", "gates", "words"),
    [
        (SCORER, None, "no gates are given"),
        (ChunkScorer("key_norm"), {}, "gates belong to the scorer"),
        (SCORER, {"n_kv_heads": 2}, r"the model has \(2, 4, 2\)"),
    ],
)
def test_gates_that_do_not_fit_are_refused(scorer, gates, words):
    gates = None if gates is None else make_gates(**gates)
    with pytest.raises(ConfigError, match=words):
        make_engine(0.4, scorer=scorer, gates=gates)


def test_gates_of_another_width_are_refused_before_anything_is_held():
    narrow = make_gates(d_model=CONFIG.d_model // 2)
    with pytest.raises(ConfigError, match="hidden states"):
        make_engine(0.4, scorer=SCORER, gates=narrow)
