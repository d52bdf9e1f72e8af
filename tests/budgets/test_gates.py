"""Learned gates: the formula, padding, and that plain gradient descent learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax.budgets.gates import EPS, Gate, gate_loss, gate_scores, init_gate, train_step
from kvgrain_jax.errors import ConfigError

WIDTH, K, G, RANK, SINKS, T = 12, 2, 3, 4, 5, 7


def make_gate(seed=0):
    gate = init_gate(
        jax.random.key(seed), d_model=WIDTH, n_kv_heads=K, group=G, rank=RANK, n_sinks=SINKS
    )
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32), gate
    )


def hidden_states(seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(T, WIDTH)), jnp.float32)


def reference_score(gate, state, head):
    """One token and head in float64, as the formula of the module says."""

    def norm(x, gain):
        return x / np.sqrt(np.mean(x**2) + EPS) * gain

    weights = {name: np.asarray(value, np.float64) for name, value in vars(gate).items()}
    key = norm(weights["key"][head] @ state, weights["key_scale"][head])
    total = 0.0
    for member in range(G):
        query = norm(weights["query"][head, member] @ state, weights["query_scale"][head])
        own = np.exp(query @ key / np.sqrt(RANK))
        against = np.exp(weights["sinks"][head] @ query / np.sqrt(RANK)).sum()
        total += own / (own + against + np.exp(weights["bias"][head, member]))
    return total / G


def test_a_gates_score_is_the_formula():
    gate, hidden = make_gate(), hidden_states()
    actual = jax.jit(gate_scores)(gate, hidden, k_positions=jnp.arange(T))
    expected = [
        [reference_score(gate, np.asarray(h, np.float64), k) for h in hidden] for k in range(K)
    ]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_padding_is_never_scored():
    positions = jnp.array([0, 1, 2, 3, 4, -1, -1], jnp.int32)
    actual = gate_scores(make_gate(), hidden_states(), k_positions=positions)
    assert np.all(np.asarray(actual[:, 5:]) == -np.inf)
    assert np.all((np.asarray(actual[:, :5]) > 0) & (np.asarray(actual[:, :5]) < 1))


def test_the_loss_is_the_binary_cross_entropy():
    gate, hidden = make_gate(), hidden_states()
    target = np.random.default_rng(3).random((K, T)).astype(np.float32)
    p = np.asarray(gate_scores(gate, hidden, k_positions=jnp.arange(T)), np.float64)
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p)).mean()
    np.testing.assert_allclose(gate_loss(gate, hidden, jnp.asarray(target)), expected, rtol=1e-5)


def test_gradient_descent_learns_which_tokens_matter():
    layers = 2
    keys = jax.random.split(jax.random.key(0), layers)
    gates: Gate = jax.vmap(
        lambda key: init_gate(key, d_model=WIDTH, n_kv_heads=K, group=G, rank=RANK, n_sinks=SINKS)
    )(keys)
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(layers, 64, WIDTH)).astype(np.float32)
    matters = (
        hidden[:, :, :K].transpose(0, 2, 1) > 0.5
    )  # head k wants tokens with a large k-th part
    target = jnp.asarray(matters.astype(np.float32))
    step = jax.jit(train_step)
    losses = []
    for _ in range(400):
        gates, loss = step(gates, jnp.asarray(hidden), target, 0.5)
        losses.append(loss)
    assert np.all(losses[-1] < 0.5 * losses[0])
    scores = jax.vmap(lambda g, h: gate_scores(g, h, k_positions=jnp.arange(64)))(
        gates, jnp.asarray(hidden)
    )
    assert np.mean((np.asarray(scores) > 0.5) == matters) > 0.9


def test_a_gate_of_rank_zero_is_an_error():
    with pytest.raises(ConfigError, match="positive"):
        init_gate(jax.random.key(0), d_model=WIDTH, n_kv_heads=K, group=G, rank=0)
