"""Scores of candidates in any order are those of the same tokens in the order of the prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgrain_jax import ConfigError
from kvgrain_jax.budgets import scores
from kvgrain_jax.budgets.chunk_scores import ChunkScorer

N_HEADS, GROUP, D, N, QUERIES = 2, 3, 8, 24, 5


def random_layer(seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (N, N_HEADS * GROUP, D))
    k, v = (jax.random.normal(key, (N, N_HEADS, D)) for key in keys[1:])
    return q, k, v


@pytest.mark.parametrize("name", ["snapkv", "expected_attention"])
def test_scores_by_queries_do_not_depend_on_the_order_of_candidates(name):
    q, k, v = random_layer()
    positions = jnp.arange(N, dtype=jnp.int32)
    at = (positions[-QUERIES:], positions)
    if name == "snapkv":
        expected = scores.snapkv(q[-QUERIES:], k, q_positions=at[0], k_positions=at[1], pool=3)
    else:
        expected = scores.expected_attention(
            q[-QUERIES:], k, q_positions=at[0], k_positions=at[1], values=v
        )
    # The last eight tokens are the chunk, with three of padding behind; survivors lie anyhow.
    order = np.stack([np.random.default_rng(h).permutation(N) for h in range(N_HEADS)])
    head = np.arange(N_HEADS)[:, None]
    scorer = ChunkScorer(name, queries=QUERIES, neighbours=3)
    padding = jnp.full(3, -1, jnp.int32)
    found = scorer.by_last_queries(
        jnp.concatenate([q[-8:], jnp.full_like(q[:3], jnp.nan)]),
        jnp.concatenate([positions[-8:], padding]),
        jnp.pad(k.swapaxes(0, 1)[head, order], ((0, 0), (0, 2), (0, 0))),
        jnp.pad(v.swapaxes(0, 1)[head, order], ((0, 0), (0, 2), (0, 0))),
        jnp.pad(jnp.asarray(order, jnp.int32), ((0, 0), (0, 2)), constant_values=-1),
        max_context=32,
    )
    np.testing.assert_allclose(found[:, :N], np.asarray(expected)[head, order], rtol=1e-5)
    assert np.all(np.isneginf(found[:, N:]))


def test_scores_on_arrival_do_not_depend_on_the_chunk():
    _, k, _ = random_layer()
    positions = jnp.arange(N, dtype=jnp.int32)
    for scorer in (ChunkScorer("key_norm"), ChunkScorer("random", seed=3)):
        whole = scorer.on_arrival(1, k, positions)
        part = scorer.on_arrival(1, k[9:], positions[9:])
        np.testing.assert_array_equal(whole[:, 9:], part)
        assert np.unique(whole).size == whole.size


def test_random_scores_differ_between_layers():
    _, k, _ = random_layer()
    positions, scorer = jnp.arange(N, dtype=jnp.int32), ChunkScorer("random")
    assert not np.array_equal(
        scorer.on_arrival(0, k, positions), scorer.on_arrival(1, k, positions)
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "kvzip"}, "cannot score chunk by chunk"),
        ({"queries": 0}, "queries is 0"),
        ({"neighbours": 4}, "odd positive"),
    ],
)
def test_impossible_scorers_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        ChunkScorer(**fields)
