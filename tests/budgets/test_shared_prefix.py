"""Both axes at once: a prefix is compressed once, and all its sharers read the same survivors."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from head_reference import HeadLists, key_norm
from tiny_head_engine import (
    MODEL,
    SINKS,
    VECTOR_BYTES,
    WINDOW,
    ask,
    budgets,
    collect,
    greedy_without_cache,
    make_engine,
    serve,
    text,
)

from kvgrain_jax import KVGrainError
from kvgrain_jax.budgets.shared import slab_layout

# Distinct tokens: rotation keeps norms, so one token twice would be a tie up to rounding.
PREFIX, OTHER = (np.random.default_rng(i).permutation(96)[:n] for i, n in ((1, 41), (2, 29)))
HOT: dict[str, Any] = {"hot_bytes": 160 * 4 * 2 * VECTOR_BYTES, "slab_align": 8}
NEW = 6


def sharer(name: str, prefix: np.ndarray, seed: int, n: int, new: int = NEW):
    prompt = np.concatenate([prefix, text(seed, n)])
    return ask(name, prompt, new, shared_tokens=prefix.size)


SHARERS = [
    sharer("a1", PREFIX, 10, 5),
    sharer("b1", OTHER, 11, 19),
    sharer("a2", PREFIX, 12, 1, new=9),
    sharer("b2", OTHER, 13, 3),
    sharer("a3", PREFIX, 14, 12),
    ask("alone", text(15, 20), NEW),
]


def definition(request, retention: float) -> tuple[int, ...]:
    """The prefix compressed to its budgets, then everything else appended whole."""
    lists, prompt, n = HeadLists(MODEL, key_norm), np.asarray(request.prompt), request.shared_tokens
    budget, first = budgets(retention).budgets(n), 0
    while first < n:
        part = prompt[first : min(first + 16, n)]
        first += part.size
        lists.feed(part, np.minimum(budget, first), keep_before=SINKS, window=WINDOW)
    return lists.generate(lists.feed(prompt[n:]), request.max_new_tokens)


def test_sharers_at_retention_1_say_what_the_model_says_without_cache():
    tokens = serve(make_engine(1.0, **HOT), SHARERS)
    for request in SHARERS:
        expected = greedy_without_cache(np.asarray(request.prompt), tokens[request.id])
        assert tokens[request.id] == expected, request.id


@pytest.fixture(scope="module")
def served():
    engine = make_engine(0.4, **HOT)
    return engine, serve(engine, SHARERS)


def test_sharers_attend_to_the_survivors_of_the_compressed_prefix(served):
    _, tokens = served
    for request in SHARERS[:2]:
        assert tokens[request.id] == definition(request, 0.4), request.id


def test_company_changes_no_token(served):
    _, tokens = served
    for request in (SHARERS[2], SHARERS[5]):
        assert serve(make_engine(0.4, **HOT), [request])[request.id] == tokens[request.id]


def test_prefix_is_stored_once_whatever_the_number_of_sharers(served):
    engine, _ = served
    budget = [budgets(0.4).budgets(prefix.size) for prefix in (PREFIX, OTHER)]
    layouts = [slab_layout(lengths, 8) for lengths in budget]
    assert engine.ledger.slab_rows == sum(size for _, size in layouts)
    assert engine.ledger.allocated_bytes == 0  # of the requests nothing is left
    assert [r.cached_tokens for r in engine.metrics.requests if r.id == "a3"] == [PREFIX.size]


def test_survivors_of_a_head_lie_one_behind_the_other(served):
    engine, _ = served
    positions = np.asarray(engine.ledger.kv.positions).reshape(-1)
    for prefix, text_ in zip(
        engine.prefixes.prefixes.values(), (OTHER, PREFIX), strict=True
    ):  # by last use
        budget = budgets(0.4).budgets(text_.size)
        for at in np.ndindex(budget.shape):
            run = positions[prefix.starts[at] :][: budget[at]]
            assert len(set(run.tolist())) == budget[at]
            assert {*range(SINKS), *range(text_.size - WINDOW, text_.size)} <= set(run.tolist())
            assert prefix.starts[at] % 8 == 0


def test_request_holds_pages_for_what_is_its_own_only(served):
    engine = served[0]
    engine.submit(dataclasses.replace(SHARERS[0], id="again"))
    engine.scheduler.admit()
    rows = 5 + NEW - 1  # its own prompt whole, and what it generates
    assert engine.ledger.allocated_bytes == 4 * -(-rows // 4) * 4 * 2 * VECTOR_BYTES
    engine.abort("again")
    assert [prefix.users for prefix in engine.prefixes.prefixes.values()] == [0, 0]


def test_preempted_sharer_says_the_same(served):
    engine, tokens = make_engine(0.4, **HOT), {}
    engine.submit(SHARERS[2])
    while len(tokens.get("a2", ())) < 3:
        collect(engine.step(), tokens)
    engine.preempt("a2")
    while engine.has_work:
        collect(engine.step(), tokens)
    assert tokens["a2"] == served[1]["a2"]


def test_idle_prefix_makes_room_and_busy_one_does_not(served):
    def occupied(n_free: int):
        engine = make_engine(0.4, **HOT)
        taken = engine.ledger.take_slab(engine.ledger.geometry.n_hot_rows - n_free)
        assert taken is not None
        return engine

    _, size = slab_layout(budgets(0.4).budgets(PREFIX.size), 8)
    room = -(-size // 8) * 8
    engine = occupied(room)
    serve(engine, [SHARERS[0]])
    assert [prefix.n_tokens for prefix in engine.prefixes.prefixes.values()] == [PREFIX.size]
    assert serve(engine, [SHARERS[1]])["b1"] == served[1]["b1"]
    assert [prefix.n_tokens for prefix in engine.prefixes.prefixes.values()] == [OTHER.size]
    # While its sharer runs a prefix stays, and who finds no room computes its own.
    engine = occupied(room)
    said = serve(engine, [SHARERS[0], SHARERS[1]])
    assert said["a1"] == served[1]["a1"]
    alone = dataclasses.replace(SHARERS[1], shared_tokens=0)
    assert said["b1"] == serve(make_engine(0.4, **HOT), [alone])["b1"]


def test_prefix_that_cannot_be_scored_takes_its_sharers_with_it_and_frees_its_slab():
    params = dict(MODEL.params)
    params["embedding"] = params["embedding"].at[int(PREFIX[3])].set(jnp.nan)
    engine = make_engine(0.4, model=dataclasses.replace(MODEL, params=params), **HOT)
    engine.submit(SHARERS[0])
    with pytest.raises(KVGrainError, match="shared prefix"):
        serve(engine)
    assert not engine.has_work
    assert engine.ledger.slab_rows == 0
    assert engine.ledger.allocated_bytes == 0
