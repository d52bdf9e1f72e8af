"""Scores against a float64 reference, and which tokens they choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.typing import DTypeLike

from kvgrain_jax.budgets import scores
from kvgrain_jax.errors import ConfigError

H, K, D, T, Q = 6, 2, 8, 20, 5  # groups of three


def inputs(seed=0, dtype: DTypeLike = jnp.float32):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(Q, H, D)).astype(jnp.dtype(dtype))
    k = rng.normal(size=(T, K, D)).astype(jnp.dtype(dtype))
    return q, k, np.arange(T - Q, T, dtype=np.int32), np.arange(T, dtype=np.int32)


def reference_attention(q, k, q_positions, k_positions):
    """Float64 weights ``[H, Q, T]``, one query head and query at a time."""
    weights = np.zeros((H, len(q), len(k)))
    for head in range(H):
        for i, position in enumerate(q_positions):
            seen = (k_positions >= 0) & (k_positions <= position)
            logits = k[seen, head // (H // K)].astype(np.float64) @ q[i, head] / np.sqrt(D)
            powers = np.exp(logits - logits.max())
            weights[head, i, seen] = powers / powers.sum()
    return weights


def by_name(name, q, k, q_positions, k_positions):
    return np.asarray(
        scores.score_tokens(
            name,
            jnp.asarray(q),
            jnp.asarray(k),
            q_positions=jnp.asarray(q_positions),
            k_positions=jnp.asarray(k_positions),
            key=jax.random.key(7),
        )
    )


def test_kvzip_is_the_largest_attention_over_queries_and_query_group():
    weights = reference_attention(*inputs())
    expected = weights.reshape(K, H // K, Q, T).max(axis=(1, 2))
    np.testing.assert_allclose(by_name("kvzip", *inputs()), expected, rtol=1e-5)


def test_snapkv_is_mean_attention_averaged_over_seven_neighbours():
    mean = reference_attention(*inputs()).reshape(K, H // K, Q, T).mean(axis=(1, 2))
    expected = np.stack([mean[:, max(0, t - 3) : t + 4].mean(axis=1) for t in range(T)], axis=1)
    np.testing.assert_allclose(by_name("snapkv", *inputs()), expected, rtol=1e-5)


def test_snapkv_without_pooling_is_mean_attention():
    q, k, *positions = map(jnp.asarray, inputs())
    expected = reference_attention(*inputs()).reshape(K, H // K, Q, T).mean(axis=(1, 2))
    actual = scores.snapkv(q, k, q_positions=positions[0], k_positions=positions[1], pool=1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("pool", [0, 4])
def test_a_pool_that_has_no_middle_is_an_error(pool):
    q, k, *positions = map(jnp.asarray, inputs())
    with pytest.raises(ConfigError, match=f"pool is {pool}"):
        scores.snapkv(q, k, q_positions=positions[0], k_positions=positions[1], pool=pool)


def test_expected_attention_is_that_of_many_draws_from_the_same_normal_distribution():
    q, k, q_positions, k_positions = inputs()
    grouped = q.astype(np.float64).reshape(Q, K, H // K, D)
    expected = np.zeros((K, T))
    rng = np.random.default_rng(1)
    for head in range(K):
        for member in range(H // K):
            own = grouped[:, head, member]
            drawn = rng.multivariate_normal(own.mean(0), np.cov(own.T, bias=True), size=100_000)
            powers = np.exp(drawn @ k[:, head].T / np.sqrt(D)).mean(axis=0)
            expected[head] += powers / powers.sum() / (H // K)
    actual = by_name("expected_attention", q, k, q_positions, k_positions)
    np.testing.assert_allclose(actual, expected, rtol=0.03)


def test_expected_attention_weighs_by_the_length_of_the_value():
    q, k, *positions = map(jnp.asarray, inputs())
    v = jnp.asarray(np.random.default_rng(2).normal(size=(T, K, D)), jnp.float32)
    weighed, plain = (
        scores.expected_attention(
            q, k, values=values, q_positions=positions[0], k_positions=positions[1]
        )
        for values in (v, None)
    )
    ratio = weighed / plain
    np.testing.assert_allclose(ratio, np.linalg.norm(v, axis=-1).T, rtol=1e-5)


def test_short_keys_score_high():
    _, k, _, k_positions = inputs()
    actual = scores.key_norm(jnp.asarray(k), k_positions=jnp.asarray(k_positions))
    np.testing.assert_allclose(actual, -np.linalg.norm(k, axis=-1).T, rtol=1e-6)


def test_random_scores_depend_on_position_and_head_only():
    key = jax.random.key(0)
    whole = scores.random(key, 3, k_positions=jnp.arange(10))
    chunk = scores.random(key, 3, k_positions=jnp.arange(6, 10))
    np.testing.assert_array_equal(whole[:, 6:], chunk)
    assert len(np.unique(whole)) == 30


@pytest.mark.parametrize("name", scores.SCORERS)
def test_padding_is_never_scored_and_changes_nothing(name):
    q, k, q_positions, k_positions = inputs()
    expected = by_name(name, q, k, q_positions, k_positions)
    garbage = np.full((4, 1, D), np.nan, np.float32)
    actual = by_name(
        name,
        np.concatenate([q, np.repeat(garbage, H, axis=1)]),
        np.concatenate([k, np.repeat(garbage, K, axis=1)]),
        np.concatenate([q_positions, np.full(4, -1, np.int32)]),
        np.concatenate([k_positions, np.full(4, -1, np.int32)]),
    )
    np.testing.assert_allclose(actual[:, :T], expected, rtol=1e-6)
    assert np.all(actual[:, T:] == -np.inf)


@pytest.mark.parametrize("name", scores.SCORERS)
def test_scores_are_float32_of_a_kv_head_each(name):
    q, k, *positions = inputs(dtype=jnp.bfloat16)
    actual = by_name(name, q, k, *positions)
    assert actual.dtype == np.float32
    assert actual.shape == (K, T)
    assert np.all(np.isfinite(actual))


def test_an_unknown_scorer_is_an_error():
    with pytest.raises(ConfigError, match="no scorer 'h2o'; choose one of snapkv"):
        by_name("h2o", *inputs())


def test_random_without_a_key_is_an_error():
    q, k, *positions = map(jnp.asarray, inputs())
    with pytest.raises(ConfigError, match="needs a key"):
        scores.score_tokens("random", q, k, q_positions=positions[0], k_positions=positions[1])


def test_sinks_and_window_are_chosen_first_and_count_against_the_budget():
    falling = jnp.arange(10.0)[None, ::-1]
    protected = scores.protect(falling, jnp.arange(10), 10, sinks=1, window=2)
    kept = scores.top_k_mask(protected, jnp.array([5], jnp.int32))
    np.testing.assert_array_equal(np.flatnonzero(kept), [0, 1, 2, 8, 9])


def test_a_window_of_zero_protects_nothing():
    flat = jnp.zeros((1, 4))
    np.testing.assert_array_equal(
        scores.protect(flat, jnp.arange(4), 4, sinks=0, window=0), np.zeros((1, 4))
    )


def test_padding_behind_the_prompt_is_not_protected():
    positions = jnp.array([0, 1, 2, -1], jnp.int32)
    padded = jnp.array([[0.0, 0.0, 0.0, -jnp.inf]])
    protected = scores.protect(padded, positions, 3, sinks=1, window=1)
    np.testing.assert_array_equal(protected, [[np.inf, 0.0, np.inf, -np.inf]])


def test_equal_scores_keep_the_first_tokens_and_the_window():
    protected = scores.protect(jnp.zeros((1, 8)), jnp.arange(8), 8, sinks=0, window=2)
    kept = scores.top_k_mask(protected, jnp.array([4], jnp.int32))
    np.testing.assert_array_equal(np.flatnonzero(kept), [0, 1, 6, 7])


@settings(deadline=None, max_examples=30)
@given(
    arrays.arrays(np.float32, (3, 12), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0, -np.inf])),
    arrays.arrays(np.int32, 3, elements=st.integers(0, 14)),
)
def test_top_k_is_that_of_a_stable_sort(values, budgets):
    mask = np.asarray(scores.top_k_mask(jnp.asarray(values), jnp.asarray(budgets)))
    indices = np.asarray(scores.top_k_indices(jnp.asarray(values), jnp.asarray(budgets), 14))
    for row in range(3):
        order = sorted(range(12), key=lambda t: (-values[row, t], t))
        real = [t for t in order[: budgets[row]] if values[row, t] > -np.inf]
        np.testing.assert_array_equal(np.flatnonzero(mask[row]), sorted(real))
        np.testing.assert_array_equal(indices[row], sorted(real) + [12] * (14 - len(real)))


def test_a_global_choice_gives_heads_what_they_earn():
    layered = jnp.array([[[0.9, 0.8, 0.1], [0.2, 0.1, 0.1]], [[0.3, 0.7, 0.6], [0.0, 0.0, 0.0]]])
    kept = scores.global_top_k_mask(layered, 4)
    np.testing.assert_array_equal(kept.sum(axis=-1), [[2, 0], [2, 0]])


def test_nan_scores_are_an_error():
    with pytest.raises(ConfigError, match="1 of 2 scores are NaN"):
        scores.check_scores(jnp.array([0.5, jnp.nan]))


def test_a_nan_key_reaches_the_check():
    q, k, *positions = inputs()
    k[3, 0, 0] = np.nan
    for name in ("snapkv", "kvzip", "expected_attention", "key_norm"):
        with pytest.raises(ConfigError, match="NaN"):
            scores.check_scores(by_name(name, q, k, *positions))


def test_scores_that_are_infinite_on_purpose_pass_the_check():
    scores.check_scores(np.array([np.inf, -np.inf, 0.0]))
