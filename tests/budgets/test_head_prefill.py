"""Compression inside prefill against lists of tokens in float64: what stays, and what comes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_reference import HeadLists, Token, key_norm, random, snapkv
from tiny_head_engine import (
    CHUNK,
    CONFIG,
    MODEL,
    SINKS,
    SNAPKV,
    WINDOW,
    ask,
    budgets,
    collect,
    held_tokens,
    make_engine,
    serve,
    text,
)

from kvgrain_jax import KVGrainError
from kvgrain_jax.budgets.chunk_scores import ChunkScorer

# Distinct tokens: rotation keeps norms, so one token twice would be a tie up to rounding.
PROMPT = np.random.default_rng(1).permutation(CONFIG.vocabulary)[: 3 * CHUNK + 5]
SCORERS = {
    "key_norm": (ChunkScorer("key_norm"), key_norm),
    "random": (ChunkScorer("random", seed=7), random(7, 4)),
    "snapkv": (SNAPKV, snapkv(8, 5)),
}


def targets(floors: str, n_computed: int, retention: float) -> np.ndarray:
    """Tokens that each head holds once so many of ``PROMPT`` are computed, from the definition."""
    budget = budgets(retention).budgets(PROMPT.size)
    protected = SINKS + WINDOW
    if floors == "final":
        return np.minimum(budget, n_computed)
    share = (budget - protected) * max(0, n_computed - protected) // (PROMPT.size - protected)
    return np.minimum(n_computed, protected + share)


def reference(score, retention: float, floors: str = "final", chunk: int = CHUNK):
    """Lists of tokens after the prompt, and the logits behind it."""
    lists, logits = HeadLists(MODEL, score), np.zeros(0)
    for first in range(0, PROMPT.size, chunk):
        part = PROMPT[first : first + chunk]
        kept = targets(floors, first + part.size, retention)
        logits = lists.feed(part, kept, keep_before=SINKS, window=WINDOW)
    return lists, logits


def prefill(new: int = 20, **options):
    """An engine whose one request has just been prefilled, and the request's tokens so far."""
    engine = make_engine(**options)
    engine.submit(ask("r", PROMPT, new))
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.scheduler.next_prompt() is not None or engine.scheduler.waiting:
        engine.scheduler.admit()
        collect(engine._prefill(), tokens)
    return engine, tokens


@pytest.mark.parametrize(
    ("name", "floors"),
    [("key_norm", "final"), ("key_norm", "proportional"), ("random", "final"), ("snapkv", "final")],
)
def test_heads_hold_the_tokens_that_the_definition_says(name, floors):
    scorer, score = SCORERS[name]
    engine, tokens = prefill(retention=0.4, scorer=scorer, floors=floors)
    lists, logits = reference(score, 0.4, floors)
    assert tokens["r"] == (int(logits.argmax()),)
    for at, held in held_tokens(engine).items():
        assert sorted(held) == lists.positions(*at), at
        for token in lists.tokens[at]:
            expected = np.concatenate([token.k, token.v])
            np.testing.assert_allclose(held[token.position], expected, rtol=2e-4, atol=2e-5)


def test_generated_tokens_are_those_of_attention_to_what_is_kept():
    said = serve(make_engine(0.4), [ask("r", PROMPT, 8)])["r"]
    lists, logits = reference(key_norm, 0.4)
    assert said == lists.generate(logits, 8)
    assert said != serve(make_engine(1.0), [ask("r", PROMPT, 8)])["r"]  # what was dropped mattered


def test_every_head_holds_exactly_its_budget_sinks_and_window_among_it():
    engine, _ = prefill(retention=0.3, scorer=SNAPKV)
    budget = budgets(0.3).budgets(PROMPT.size)
    assert budget.min() < budget.max()
    protected = {*range(SINKS), *range(PROMPT.size - WINDOW, PROMPT.size)}
    for at, held in held_tokens(engine).items():
        assert len(held) == budget[at]
        assert protected <= set(held)


def test_choice_is_that_of_the_whole_prompt_where_scores_do_not_depend_on_chunks():
    engine, _ = prefill(retention=0.3, scorer=SCORERS["random"][0])
    budget = budgets(0.3).budgets(PROMPT.size)
    for (layer, head), held in held_tokens(engine).items():
        tokens = [Token(p, np.zeros(0), np.zeros(0), 0.0) for p in range(PROMPT.size)]
        scores = SCORERS["random"][1](layer, head, np.zeros(0), np.zeros(0), tokens)
        scores[:SINKS] = scores[-WINDOW:] = np.inf
        best = np.argsort(-scores, kind="stable")[: budget[layer, head]]
        assert sorted(held) == sorted(best.tolist())


def test_score_that_is_not_a_number_ends_its_request_and_frees_its_pages():
    params = jax.tree.map(lambda x: x, MODEL.params)
    params["embedding"] = jax.tree.map(lambda x: x.at[3].set(jnp.nan), params["embedding"])
    engine = make_engine(0.4, model=dataclasses.replace(MODEL, params=params))
    poisoned, fine = text(2, 20), text(3, 20)
    poisoned[9], fine[fine == 3] = 3, 4
    engine.submit(ask("poisoned", poisoned, 1))
    engine.submit(ask("fine", fine, 1))
    with pytest.raises(KVGrainError, match="Request poisoned: scores of its tokens are NaN"):
        serve(engine)
    assert [row.request.id for row in engine.scheduler.running] == ["fine"]
    assert len(serve(engine)["fine"]) == 1
    assert engine.ledger.allocated_bytes == 0
