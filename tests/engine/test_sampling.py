"""Sampling: support, frequencies and reproducibility against plain probability in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import ArrayLike

from kvgrain_jax.engine.sampling import sample

ROWS, VOCABULARY = 8192, 12
_sample = jax.jit(sample)
LOGITS = np.random.default_rng(1).normal(0, 1.5, VOCABULARY).astype(np.float32)


def draw(
    logits: np.ndarray = LOGITS,
    *,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    seed: ArrayLike | None = None,
    n_generated: ArrayLike = 0,
) -> np.ndarray:
    """One token for each row; a single value of a parameter is that of all rows."""

    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), ROWS))

    return np.asarray(
        _sample(
            jnp.asarray(np.broadcast_to(logits, (ROWS, VOCABULARY))),
            column(temperature, np.float32),
            column(top_k, np.int32),
            column(top_p, np.float32),
            column(np.arange(ROWS) if seed is None else seed, np.uint32),
            column(n_generated, np.int32),
        )
    )


def probabilities(temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
    """What the parameters mean, in float64, one token at a time."""
    order = sorted(range(VOCABULARY), key=lambda token: (-LOGITS[token], token))
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    kept = order[:top_k] if top_k else order
    total = weights[kept].sum()
    nucleus, reached = [], 0.0
    for token in kept:
        if reached >= top_p:
            break
        nucleus.append(token)
        reached += weights[token] / total
    result = np.zeros(VOCABULARY)
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": VOCABULARY},
    {"top_k": 1000},
    {"top_p": 0.01},
    {"top_p": 0.7},
    {"top_p": 0.95},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.8},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_come_as_often_as_their_probability_says(case):
    want = probabilities(**case)
    counts = np.bincount(draw(**case), minlength=VOCABULARY)
    assert np.all(counts[want == 0] == 0)
    # Hoeffding: all frequencies lie within the bound but for one run in a million.
    bound = math.sqrt(math.log(2 * VOCABULARY * 1e6) / (2 * ROWS))
    np.testing.assert_allclose(counts / ROWS, want, atol=bound)
    assert set(np.flatnonzero(want > bound)) <= set(np.flatnonzero(counts))


def test_temperature_zero_takes_the_most_likely_token():
    logits = np.random.default_rng(2).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    np.testing.assert_array_equal(draw(logits, temperature=0.0), logits.argmax(axis=1))


@pytest.mark.parametrize("tiny", [1e-38, 1e-30, 1e-6])
def test_a_temperature_close_to_zero_is_all_but_greedy(tiny):
    assert set(draw(temperature=tiny)) == {int(LOGITS.argmax())}
    assert set(draw(LOGITS - 100, temperature=tiny)) == {int(LOGITS.argmax())}


@pytest.mark.parametrize("case", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_of_equal_logits_the_lowest_token_id_wins(case):
    logits = np.zeros(VOCABULARY, np.float32)
    logits[[5, 7, 11]] = 3.0
    assert set(draw(logits, **case)) == {5}


def test_of_equal_logits_at_the_edge_of_top_k_the_lowest_ids_are_kept():
    logits = np.zeros(VOCABULARY, np.float32)
    logits[9] = 1.0
    assert set(draw(logits, top_k=3)) == {0, 1, 9}


def test_a_rows_token_does_not_depend_on_its_company():
    mixed = draw(temperature=np.linspace(0, 2, ROWS), top_k=np.arange(ROWS) % 5)
    others = draw(
        temperature=np.where(np.arange(ROWS) == 4321, 2 * 4321 / (ROWS - 1), 0.3),
        top_k=np.where(np.arange(ROWS) == 4321, 4321 % 5, 2),
        seed=np.where(np.arange(ROWS) == 4321, 4321, 7),
    )
    assert mixed[4321] == others[4321]


def test_greedy_and_sampled_rows_share_a_batch():
    temperature = np.where(np.arange(ROWS) % 2, 1.0, 0.0)
    tokens = draw(temperature=temperature)
    np.testing.assert_array_equal(tokens[::2], LOGITS.argmax())
    np.testing.assert_array_equal(tokens[1::2], draw()[1::2])


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others():
    steps = np.arange(ROWS)
    first = draw(seed=3, n_generated=steps)
    np.testing.assert_array_equal(first, draw(seed=3, n_generated=steps))
    # Two independent draws agree with probability sum(p²), here about 0.2.
    chance = float(np.sum(probabilities() ** 2))
    bound = math.sqrt(math.log(2e6) / (2 * ROWS))
    assert abs(np.mean(first == draw(seed=4, n_generated=steps)) - chance) < bound


def test_the_draws_of_one_seed_are_spread_like_independent_ones():
    counts = np.bincount(draw(seed=5, n_generated=np.arange(ROWS)), minlength=VOCABULARY)
    bound = math.sqrt(math.log(2 * VOCABULARY * 1e6) / (2 * ROWS))
    np.testing.assert_allclose(counts / ROWS, probabilities(), atol=bound)


def test_large_seeds_differ():
    assert not np.array_equal(
        draw(seed=2**32 - 1, n_generated=np.arange(ROWS)),
        draw(seed=2**31 - 1, n_generated=np.arange(ROWS)),
    )
