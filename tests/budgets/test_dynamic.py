"""Compress and reclaim: what the dynamic baseline keeps, and what it has to give back."""

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
    groups_of,
    make_engine,
    serve,
    text,
)

from kvgrain_jax import ConfigError, KVGrainError
from kvgrain_jax.budgets.dynamic import DynamicEngine
from kvgrain_jax.budgets.ledger import HeadLedger

PROMPT = text(1, 53)
NEW = 9


def make(retention: float, **options) -> DynamicEngine:
    engine = make_engine(retention, engine=DynamicEngine, **options)
    assert isinstance(engine, DynamicEngine)
    return engine


def test_all_heads_compete_for_the_places_of_the_retention():
    engine = make(0.4)
    engine.submit(ask("r", PROMPT, NEW))
    tokens: dict[str, tuple[int, ...]] = {}
    while not tokens:
        collect(engine.step(), tokens)
    # The whole prompt in float64, then one sort over all heads; ties by layer, head, position.
    lists = HeadLists(MODEL, key_norm)
    logits = lists.feed(PROMPT)
    every = [
        (
            -np.inf
            if t.position < SINKS or t.position >= PROMPT.size - WINDOW
            else np.linalg.norm(t.k),
            at,
            t,
        )
        for at, tokens_of_head in sorted(lists.tokens.items())
        for t in tokens_of_head
    ]
    every.sort(key=lambda entry: entry[0])
    best = every[: budgets(0.4).total(PROMPT.size)]
    for at in lists.tokens:
        lists.tokens[at] = [t for _, of, t in best if of == at]
        assert engine.kept["r"][at] == len(lists.tokens[at])
    assert len({int(n) for n in engine.kept["r"].ravel()}) > 1
    while engine.has_work:
        collect(engine.step(), tokens)
    assert tokens["r"] == lists.generate(logits, NEW)


def test_pages_of_the_whole_prompt_are_taken_and_the_empty_ones_given_back():
    engine = make(0.3)
    engine.submit(ask("r", PROMPT, NEW))
    engine.scheduler.admit()
    row_bytes = 2 * VECTOR_BYTES
    whole = 4 * -(-(PROMPT.size + NEW - 1) // 4) * 4 * row_bytes  # 4 groups, pages of 4 rows
    assert engine.ledger.allocated_bytes == whole
    while not engine.scheduler.row(0).decoding:
        engine.step()
    engine.check_integrity()
    most = groups_of(2).by_group(engine.kept["r"]).max(axis=1)
    left = int((-(-(most + NEW - 1) // 4) * 4).sum()) * row_bytes
    assert engine.ledger.allocated_bytes == left < whole
    assert engine.times.pages * engine.ledger.geometry.page_bytes == whole - left
    assert engine.times.reclaim > 0
    serve(engine)
    assert engine.ledger.allocated_bytes == 0


def test_retention_1_gives_back_nothing_and_says_what_the_plain_model_says():
    engine = make(1.0)
    said = serve(engine, [ask("r", PROMPT, NEW)])["r"]
    assert said == greedy_without_cache(PROMPT, said)
    assert engine.times.pages == 0


def test_static_budgets_give_pages_back_once_at_the_end(monkeypatch):
    calls = []
    release = HeadLedger.release

    def counted(ledger, table, n_pages):
        calls.append(n_pages)
        release(ledger, table, n_pages)

    monkeypatch.setattr(HeadLedger, "release", counted)
    engine, request = make_engine(0.4), ask("r", PROMPT, NEW)
    serve(engine, [request])
    assert calls == [engine.footprint(request).pages]


def test_conversations_are_refused():
    with pytest.raises(ConfigError, match="not conversations"):
        make(0.4).submit(ask("r", PROMPT), conversation="talk")


def test_request_retention_is_that_of_all_heads():
    engine = make(0.9)
    engine.submit(ask("r", PROMPT, 1), retention=0.3)
    serve(engine)
    assert engine.kept["r"].sum() == budgets(0.3).total(PROMPT.size)


def test_pauses_are_refused():
    engine = make(0.4)
    engine.submit(ask("r", PROMPT))
    with pytest.raises(KVGrainError, match="cannot compute a request again"):
        engine.preempt("r")
