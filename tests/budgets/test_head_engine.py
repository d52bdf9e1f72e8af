"""The engine over head groups: tokens, bytes, admission, conversations, and pauses."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from tiny_head_engine import (
    CONFIG,
    DEMANDS,
    MAX_CONTEXT,
    MODEL,
    NORMED_HEADS,
    VECTOR_BYTES,
    ask,
    budgets,
    collect,
    greedy_without_cache,
    groups_of,
    make_engine,
    occupy,
    say,
    serve,
    text,
)

from kvgrain_jax import ConfigError, RequestError, SamplingParams
from kvgrain_jax.budgets import make_groups, uniform_plan
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.budgets.engine_config import HeadEngineConfig

WORKLOAD = [
    ask("short", text(10, 3)),
    ask("one chunk", text(11, 16), new=9),
    ask("several", text(12, 53)),
    ask("one token", text(13, 1), new=11),
    ask("one new", text(14, 20), new=1),
    ask("long", text(15, 70), new=20),
]
PAGE_BYTES = 4 * 2 * VECTOR_BYTES  # 4 rows of 2 heads


OTHER_LAYOUT: dict[str, Any] = {"group_size": 4, "scope": "layer", "page_size": 16, "n_blocks": 8}


@pytest.mark.parametrize(
    ("scorer", "model"),
    [("key_norm", MODEL), ("random", NORMED_HEADS)],  # the first takes projections apart
    ids=["plain", "normed heads"],
)
def test_tokens_at_retention_1_are_those_of_a_forward_pass_without_cache(scorer, model):
    tokens = serve(make_engine(1.0, scorer=ChunkScorer(scorer), model=model), WORKLOAD)
    for request in WORKLOAD:
        own = tokens[request.id]
        assert own == greedy_without_cache(np.asarray(request.prompt), own, model), request.id
        assert len(own) == request.max_new_tokens


@pytest.fixture(scope="module")
def compressed():
    """Tokens of the workload at retention 0.4, each request served alone."""
    tokens = {}
    for request in WORKLOAD:
        tokens |= serve(make_engine(0.4), [request])
    return tokens


def test_compressed_tokens_do_not_depend_on_the_company(compressed):
    assert serve(make_engine(0.4), WORKLOAD) == compressed


def test_groups_pages_and_splits_change_no_token(compressed):
    long = WORKLOAD[2::3]  # whose prompts are compressed
    tokens = serve(make_engine(0.4, **OTHER_LAYOUT), long)
    assert tokens == {request.id: compressed[request.id] for request in long}


@pytest.mark.parametrize("group_size", [1, 2, 4, 8])
def test_request_holds_its_footprint_to_the_byte_and_no_more(group_size):
    engine = make_engine(0.4, group_size=group_size)
    request = ask("r", text(20, 60), new=9)
    engine.submit(request)
    engine.scheduler.admit()
    # Eight tokens are appended to each head; a group's pages hold its largest budget and these.
    rows = groups_of(group_size).by_group(budgets(0.4).budgets(60)).max(axis=1) + 8
    pages = int((-(-rows // 4)).sum())
    assert engine.ledger.allocated_bytes == pages * 4 * group_size * VECTOR_BYTES
    footprint = engine.footprint(request)
    assert footprint.allocated_bytes == engine.ledger.allocated_bytes
    assert footprint.used_bytes == (budgets(0.4).total(60) + 8 * 8) * VECTOR_BYTES
    engine.abort("r")
    assert engine.ledger.allocated_bytes == 0


def test_memory_really_shrinks():
    def bytes_at(retention):
        engine = make_engine(retention, group_size=1)
        engine.submit(ask("r", text(20, 80), new=1))
        engine.scheduler.admit()
        return engine.ledger.allocated_bytes

    whole = 8 * 80 * VECTOR_BYTES
    assert bytes_at(1.0) == whole
    # A quarter, and at most a page less one row a head on top.
    assert whole / 4 <= bytes_at(0.25) <= whole / 4 + 8 * 3 * VECTOR_BYTES


def test_as_many_requests_run_as_their_footprints_fit():
    def running(retention, free):
        engine = make_engine(retention, max_batch=8)
        occupy(engine, free)
        for i in range(8):
            engine.submit(ask(f"r{i}", text(30 + i, 60), new=5))
        engine.scheduler.admit()
        return len(engine.scheduler.running)

    one = make_engine(0.25).footprint(ask("r", text(30, 60), new=5)).pages
    assert running(0.25, 5 * one) == 5
    assert running(0.25, 5 * one - 1) == 4
    assert running(1.0, 5 * one) == 1


def test_pool_of_one_footprint_serves_everything_one_by_one(compressed):
    pages = max(make_engine(0.4).footprint(request).pages for request in WORKLOAD)
    engine = make_engine(0.4)
    occupy(engine, pages)
    assert serve(engine, WORKLOAD, check=False) == compressed
    assert engine.ledger.free == pages


def test_retention_can_be_chosen_for_a_request():
    engine = make_engine(1.0)
    request = WORKLOAD[2]
    engine.submit(request, retention=0.4)
    engine.submit(dataclasses.replace(request, id="whole"))
    tokens = serve(engine)
    assert tokens["several"] == serve(make_engine(0.4), [request])["several"]
    assert tokens["whole"] == greedy_without_cache(np.asarray(request.prompt), tokens["whole"])


# -- pauses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_steps", [2, 5, 6])
def test_preempted_request_says_the_same(compressed, n_steps):
    engine, tokens = make_engine(0.4), {}
    engine.submit(WORKLOAD[5])
    engine.submit(WORKLOAD[0])
    for _ in range(n_steps):  # in the middle of the prompt, at its end, while it decodes
        collect(engine.step(), tokens)
    engine.preempt("long")
    assert engine.scheduler.find("long") is None
    engine.check_integrity()
    while engine.has_work:
        collect(engine.step(), tokens)
    assert tokens == {name: compressed[name] for name in ("long", "short")}
    assert engine.ledger.allocated_bytes == 0


def test_preempted_request_draws_the_same_sampled_tokens():
    sampling = SamplingParams(temperature=0.9, top_k=20, seed=3)
    request = ask("s", text(40, 40), new=16, sampling=sampling)
    alone = serve(make_engine(0.4), [request])
    engine, tokens = make_engine(0.4), {}
    engine.submit(request)
    for _ in range(4):
        collect(engine.step(), tokens)
    assert tokens["s"]
    engine.preempt("s")
    while engine.has_work:
        collect(engine.step(), tokens)
    assert tokens == alone


def test_aborted_request_frees_what_it_held_and_the_others_go_on(compressed):
    engine, tokens = make_engine(0.4), {}
    for request in WORKLOAD[4:] + WORKLOAD[:1]:
        engine.submit(request)
    collect(engine.step(), tokens)
    engine.abort("long")
    engine.check_integrity()
    while engine.has_work:
        collect(engine.step(), tokens)
    assert tokens == {name: compressed[name] for name in ("one new", "short")}
    assert engine.ledger.allocated_bytes == 0
    with pytest.raises(RequestError, match="no request 'long'"):
        engine.abort("long")


def test_a_request_may_be_aborted_while_tokens_are_handed_out(compressed):
    """With the first token of one request, another that decodes already; then the request itself."""
    engine, names, tokens = make_engine(0.4), [], {}

    def on_event(event):
        names.append(event.id)
        collect([event], tokens)
        if event.id == "long":
            engine.abort("runs" if names.count("long") == 1 else "long")

    engine.run([ask("runs", text(12, 53), new=40), WORKLOAD[5], WORKLOAD[0]], on_event)
    engine.check_integrity()
    assert "runs" in names[: names.index("long")]
    assert "runs" not in names[names.index("long") :]
    assert names.count("long") == 2
    assert tokens["short"] == compressed["short"]
    assert engine.ledger.allocated_bytes == 0


# -- conversations -----------------------------------------------------------------------------------

TURNS = [text(50, 30), text(51, 9), text(52, 21)]


def talk(engine: HeadEngine, before_turn=lambda engine: None) -> list[tuple[int, ...]]:
    said = []
    for i, turn in enumerate(TURNS):
        before_turn(engine)
        said.append(say(engine, f"turn {i}", turn, "talk", new=5))
    return said


def drop_cache(engine: HeadEngine) -> None:
    for conversation in engine.scheduler.conversations.values():
        engine.scheduler.forget_cache(conversation)
    assert engine.ledger.allocated_bytes == 0


POLICIES = ["first_prompt_only", "each_turn", "rebudget"]


@pytest.mark.parametrize("policy", POLICIES)
def test_conversation_at_retention_1_is_that_of_a_forward_pass_without_cache(policy):
    said = talk(make_engine(1.0, turns=policy))
    history = np.zeros(0, np.int64)
    for turn, answer in zip(TURNS, said, strict=True):
        history = np.concatenate([history, turn])
        assert answer == greedy_without_cache(history, answer)
        history = np.concatenate([history, answer])


@pytest.mark.parametrize("policy", POLICIES)
def test_conversation_whose_cache_was_dropped_goes_on_the_same(policy):
    kept = talk(make_engine(0.4, turns=policy))
    assert talk(make_engine(0.4, turns=policy), drop_cache) == kept


def test_policies_keep_different_tokens():
    engines = {policy: make_engine(0.4, turns=policy) for policy in POLICIES}
    said = {policy: talk(engine) for policy, engine in engines.items()}
    assert len({tuple(answers) for answers in said.values()}) == 3
    held = {policy: engine.ledger.allocated_bytes for policy, engine in engines.items()}
    assert held["first_prompt_only"] > held["each_turn"] > held["rebudget"]


def test_idle_conversation_makes_room_and_comes_back():
    said = talk(make_engine(0.4))
    engine = make_engine(0.4)
    occupy(engine, 80)

    def crowd(engine):
        request = ask(f"crowd {len(engine.metrics.requests)}", text(60, 90), 6)
        serve(engine, [request], check=False)

    assert talk(engine, crowd) == said
    held = engine.scheduler.conversations["talk"].cache
    assert held is not None
    crowd(engine)
    assert engine.scheduler.conversations["talk"].cache is None
    assert engine.ledger.free == 80


def test_waiting_turns_never_hold_each_other_up():
    engine = make_engine(0.4)
    occupy(engine, 42)
    for i in range(2):
        say(engine, f"first {i}", TURNS[0], f"talk {i}", new=2)
    for i in range(2):
        engine.submit(ask(f"second {i}", TURNS[2], new=2), conversation=f"talk {i}")
    tokens = serve(engine, check=False)
    assert tokens["second 0"] == tokens["second 1"]


@pytest.mark.parametrize(
    ("patience", "order"),
    [
        (0, ["large", "second 0", "second 1"]),
        (1, ["second 0", "large", "second 1"]),
        (2, ["second 0", "second 1", "large"]),
    ],
)
def test_turns_whose_pages_are_there_go_before_a_request_that_would_drop_them(patience, order):
    engine = make_engine(0.4, patience=patience, max_batch=1)
    occupy(engine, 48)
    for i in range(2):
        say(engine, f"first {i}", TURNS[0], f"talk {i}", new=2)
    engine.submit(ask("large", text(60, 90)))
    for i in range(2):
        engine.submit(ask(f"second {i}", TURNS[1], new=2), conversation=f"talk {i}")
    assert list(serve(engine, check=False)) == order


# -- bad input ---------------------------------------------------------------------------------------


def test_engine_refuses_budgets_and_groups_of_another_model():
    config = HeadEngineConfig(pool_bytes=10**6)
    model = make_engine().model
    plan, groups = budgets(0.5), groups_of(2)
    with pytest.raises(ConfigError, match="budgets are of 3 layers of 4 KV heads"):
        HeadEngine(model, uniform_plan(3, 4, 0.5, sinks=1, window=1), groups, config)
    with pytest.raises(ConfigError, match="groups are of 2 layers of 2 KV heads"):
        HeadEngine(model, plan, make_groups(DEMANDS[:, :2], 2), config)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("r", np.asarray([CONFIG.vocabulary])), "outside the vocabulary"),
        (ask("r", text(1, MAX_CONTEXT), new=1), "more than the context"),
        (ask("r", text(1, 80), new=9), "its footprint is 45 pages, the pool has 30"),
    ],
)
def test_request_that_can_never_be_served_is_refused_at_once(request_, words):
    engine = make_engine(0.4, pool_bytes=30 * PAGE_BYTES)
    with pytest.raises(RequestError, match=words):
        engine.submit(request_)
    assert not engine.has_work


def test_greedy_engine_says_the_same_and_refuses_to_draw(compressed):
    engine = make_engine(0.4, greedy=True)
    assert serve(engine, [WORKLOAD[0]]) == {"short": compressed["short"]}
    with pytest.raises(RequestError, match="made for greedy requests only"):
        engine.submit(ask("drawn", text(1, 9), sampling=SamplingParams(temperature=1.0)))


def test_warmup_and_prefill_alone_change_no_token(compressed):
    engine, tokens = make_engine(0.4), {}
    engine.warmup()
    engine.submit(WORKLOAD[2])
    while not tokens:
        collect(engine.prefill(), tokens)
    assert len(tokens["several"]) == 1  # nothing was decoded
    engine.warmup()
    while engine.has_work:
        collect(engine.step(), tokens)
    assert tokens["several"] == compressed["several"]


@pytest.mark.parametrize("retention", [0.0, -0.5, 1.5, float("nan")])
def test_retention_outside_its_range_is_refused(retention):
    engine = make_engine()
    with pytest.raises(ConfigError, match="retention"):
        engine.submit(ask("r", text(1, 9)), retention=retention)
    assert not engine.has_work


def test_conversation_takes_one_turn_at_a_time():
    engine = make_engine()
    engine.submit(ask("a", text(1, 9)), conversation="talk")
    with pytest.raises(RequestError, match="still waits for an answer"):
        engine.submit(ask("b", text(2, 9)), conversation="talk")
    with pytest.raises(RequestError, match="no conversation 'other'"):
        engine.end_conversation("other")
    with pytest.raises(RequestError, match="still waits"):
        engine.end_conversation("talk")


def test_id_in_use_is_refused():
    engine = make_engine()
    engine.submit(ask("a", text(1, 9)))
    with pytest.raises(RequestError, match="a request with this id"):
        engine.submit(ask("a", text(2, 9)))
    assert len(engine.scheduler.waiting) == 1
    with pytest.raises(RequestError, match="does not run"):
        engine.preempt("a")
    engine.abort("a")
    assert not engine.has_work
