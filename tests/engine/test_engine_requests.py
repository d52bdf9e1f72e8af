"""The life of a request in the engine: arrival, streaming, abort, and errors that change nothing."""

import gc
import math

import jax
import numpy as np
import pytest
from tiny_engine import (
    CHUNK,
    CONFIG,
    DECODE_STEPS,
    MAX_BATCH,
    MAX_CONTEXT,
    ask,
    greedy_without_cache,
    make_engine,
    serve,
    step_until_decoding,
    text,
    tokens_of,
)

from kvgrain_jax import Request, RequestError
from kvgrain_jax.engine import serving

AGENT = text(1, 40)


class Clock:
    """Time that passes when someone sleeps or says so; stands in for the module ``time``."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.slept = []
        monkeypatch.setattr(serving, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def engine():
    """Every test ends with an engine whose books agree."""
    engine = make_engine()
    yield engine
    engine.check_integrity()


def state(engine):
    """What a refused call must leave as it was."""
    device = (engine.cache.ledger.pools, engine.device.batch)
    return (
        [np.array(leaf).tolist() for leaf in jax.tree.leaves(device)],
        engine.cache.index.size(),
        list(engine.scheduler.waiting),
        list(engine.scheduler.rows),
    )


# -- run -------------------------------------------------------------------------------------------


def test_events_of_a_request_concatenate_to_its_result_and_the_last_one_says_why_it_ended(engine):
    requests = [
        ask("one", text(10, 5), new=1),
        ask("two", AGENT, text(11, 5), new=2, shared_tokens=40),
        ask("long", AGENT, text(12, 50), new=21, shared_tokens=40),
        ask("stops", text(13, 6), new=30, stop_tokens=tuple(range(0, 16, 2))),
    ]
    events = []
    metrics = engine.run(requests, events.append)
    results = {request.id: request for request in metrics.requests}
    assert tokens_of(events) == {name: result.tokens for name, result in results.items()}
    for request in requests:
        own = [event for event in events if event.id == request.id]
        assert [event.finished for event in own] == [False] * (len(own) - 1) + [True]
        assert [event.reason for event in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].reason == results[request.id].reason
        assert all(event.tokens for event in own)
    assert [len(results[name].tokens) for name in ("one", "two", "long")] == [1, 2, 21]
    assert results["long"].reason == "length"
    assert len([event for event in events if event.id == "long"]) > 20 // DECODE_STEPS


def test_a_request_starts_when_it_arrives_and_the_engine_sleeps_until_then(engine, monkeypatch):
    clock = Clock(monkeypatch)
    seen = []
    requests = [
        ask("late", text(10, 5), arrival=50.0),
        ask("first", text(11, 5), arrival=2.0),
        ask("with late", text(12, 5), arrival=50.0),
    ]
    engine.run(requests, lambda event: seen.append((event.id, clock.now - 1000.0)))
    assert clock.slept == [2.0, 48.0]
    assert {time for name, time in seen if name == "first"} == {2.0}
    assert {time for name, time in seen if "late" in name} == {50.0}


def test_requests_that_arrive_while_others_run_join_the_batch(engine, monkeypatch):
    clock = Clock(monkeypatch)
    requests = [
        ask("early", text(10, 5), new=30),
        ask("joins", text(11, 5), new=5, arrival=1.5),
    ]

    def on_event(event):
        clock.now += 1.0

    metrics = engine.run(requests, on_event)
    assert [request.id for request in metrics.requests] == ["joins", "early"]
    assert clock.slept == []
    for request in requests:
        tokens = next(r.tokens for r in metrics.requests if r.id == request.id)
        assert tokens == greedy_without_cache(request, tokens)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request("bad", [CONFIG.vocabulary], 1), "Request bad: token id 96 is outside"),
        (Request("good", [1], 1), "Request good: 2 requests have this id"),
        (Request("there", [1], 1), "Request there: a request with this id"),
    ],
)
def test_a_run_with_a_request_that_cannot_be_served_starts_none(engine, bad, message):
    engine.submit(ask("there", text(10, 3)))
    before, metrics = state(engine), engine.metrics
    events = []
    with pytest.raises(RequestError, match=message):
        engine.run([ask("good", text(11, 3)), bad], events.append)
    assert state(engine) == before
    assert events == []
    assert engine.metrics is metrics


def test_a_run_without_requests_ends_at_once(engine):
    assert engine.run([]).requests == []


def test_more_requests_than_rows_are_all_served(engine):
    requests = [ask(f"r{i}", text(10 + i, 4), new=3) for i in range(2 * MAX_BATCH + 1)]
    metrics = engine.run(requests)
    assert sorted(r.id for r in metrics.requests) == sorted(r.id for r in requests)
    assert max(sample.running for sample in metrics.samples) <= MAX_BATCH


# -- submit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request("r", [3, CONFIG.vocabulary], 1), "token id 96 is outside the vocabulary of 96"),
        (
            Request("r", np.zeros(MAX_CONTEXT - 3, int), 4),
            "125 tokens of context and 4 new ones are 129, more than the context of 128",
        ),
        (Request("r", [1], MAX_CONTEXT), "1 tokens of context and 128 new ones are 129"),
        (Request("r", [1], 1, stop_tokens=tuple(range(9))), "9 stop tokens; a row holds 8"),
        (Request("waits", [1], 1), "Request waits: a request with this id is in the engine"),
        (Request("runs", [1], 1), "Request runs: a request with this id is in the engine"),
    ],
)
def test_a_refused_request_changes_nothing(engine, bad, message):
    engine.submit(ask("runs", AGENT, text(10, 4), shared_tokens=40))
    engine.step()
    engine.submit(ask("waits", text(11, 4)))
    before = state(engine)
    with pytest.raises(RequestError, match=message):
        engine.submit(bad)
    assert state(engine) == before


def test_a_request_that_the_whole_pool_cannot_hold_is_refused_at_once():
    engine = make_engine(pool_tokens=64)
    with pytest.raises(RequestError, match="66 tokens need 65 pages, the whole pool has 64"):
        engine.submit(Request("r", np.zeros(56, int), 10))
    engine.submit(Request("r", np.zeros(55, int), 10))


def test_a_context_may_be_filled_to_the_last_token(engine):
    request = ask("full", text(10, 100), new=MAX_CONTEXT - 100)
    tokens = serve(engine, [request])["full"]
    assert len(tokens) == 28
    assert tokens == greedy_without_cache(request, tokens)


@pytest.mark.parametrize("queue", [0, 1])
def test_first_tokens_are_handed_out_before_the_next_loop_unless_requests_wait(
    engine, monkeypatch, queue
):
    """With a request in the line the device is kept busy, else the first token is not kept back."""
    happened = []
    decode = engine.device.decode

    def noted(*args, **kwargs):
        happened.append("loop")
        return decode(*args, **kwargs)

    monkeypatch.setattr(engine.device, "decode", noted)
    first = [ask(f"r{i}", text(50 + i, 6), new=30) for i in range(MAX_BATCH + queue)]
    engine.run(first, lambda event: happened.append(event.id))
    assert happened.index("r0") == (1 if queue else 0)


# -- abort -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_an_aborted_request_gives_back_all_it_held_and_others_do_not_notice(engine, phase):
    others = [ask(f"other{i}", AGENT, text(10 + i, 6), new=40, shared_tokens=40) for i in range(3)]
    aborted = ask("aborted", AGENT, text(20, CHUNK + 9), new=30, shared_tokens=40)
    events = []
    for request in others:
        engine.submit(request)
    events += step_until_decoding(engine, 3)
    engine.submit(aborted)
    if phase != "waiting":
        events += engine.step()
    while phase == "decode" and not any(
        row.decoding and row.request is aborted for row in engine.scheduler.running
    ):
        events += engine.step()
    index = engine.scheduler.find("aborted")
    row = None if index is None else engine.scheduler.rows[index]
    assert {"waiting": row is None, "prefill": row and not row.decoding, "decode": row}[phase]
    engine.abort("aborted")
    engine.check_integrity()
    with pytest.raises(RequestError, match="no request 'aborted'"):
        engine.abort("aborted")
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    tokens = tokens_of(events)
    assert ("aborted" in tokens) == (phase == "decode")
    for request in others:
        assert len(tokens[request.id]) == 40
        assert tokens[request.id] == greedy_without_cache(request, tokens[request.id])
    assert "aborted" not in [request.id for request in engine.metrics.requests]
    assert engine.cache.ledger.outstanding == 0
    # The id is free again, and what was computed may be used.
    assert serve(engine, [aborted])["aborted"] == greedy_without_cache(
        aborted, engine.metrics.requests[-1].tokens
    )


@pytest.mark.parametrize("n_events", [1, 2, 3])
def test_a_request_may_be_aborted_while_tokens_are_handed_out(engine, n_events):
    """With its first token the device is decoding already, with later ones it is not."""
    requests = [ask(f"r{i}", AGENT, text(30 + i, 6), new=20, shared_tokens=40) for i in range(3)]
    events = []

    def on_event(event):
        events.append(event)
        if [e.id for e in events].count("r1") == n_events and event.id == "r1":
            engine.abort("r0")  # its event of this step is out already
            engine.abort("r1")
            engine.abort("r2")  # its event of this step may not be

    after = ask("after", AGENT, text(40, 5), new=12)
    engine.run([*requests, after], on_event)
    last = max(i for i, e in enumerate(events) if e.id == "r1")
    assert all(e.id in ("r2", "after") for e in events[last + 1 :])
    assert not any(e.finished for e in events if e.id != "after")
    assert [request.id for request in engine.metrics.requests] == ["after"]
    tokens = tokens_of(events)["after"]
    assert tokens == greedy_without_cache(after, tokens)
    assert not engine.has_work


def test_a_request_that_ends_with_its_first_token_leaves_its_own_row(engine):
    """Also where another is aborted meanwhile and rows take other places."""
    requests = [ask(f"r{i}", text(60 + i, 6), new=1 if i == 1 else 12) for i in range(3)]
    events = []

    def on_event(event):
        events.append(event)
        if event.id == "r2" and not event.finished and len(events) <= 3:
            engine.abort("r0")

    engine.run(requests, on_event)
    tokens = tokens_of(events)
    assert len(tokens["r0"]) == 1
    for request in requests[1:]:
        assert tokens[request.id] == greedy_without_cache(request, tokens[request.id])
        assert len(tokens[request.id]) == request.max_new_tokens


@pytest.mark.parametrize("n_events", [1, 2, 5, 8])
def test_an_error_of_who_takes_the_tokens_leaves_an_engine_that_goes_on(engine, n_events):
    requests = [ask(f"r{i}", AGENT, text(30 + i, 6), new=20, shared_tokens=40) for i in range(3)]
    events = []

    def on_event(event):
        events.append(event)
        if len(events) == n_events:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        engine.run(requests, on_event)
    engine.check_integrity()
    while engine.has_work:
        engine.step()
    for request, measured in zip(
        requests, sorted(engine.metrics.requests, key=lambda r: r.id), strict=True
    ):
        assert measured.tokens == greedy_without_cache(request, measured.tokens)


def test_the_garbage_collector_leaves_old_objects_alone_while_requests_run(engine):
    before, frozen = len(gc.get_objects()), []
    engine.run([ask("r", AGENT)], lambda _: frozen.append(gc.get_freeze_count()))
    assert min(frozen) > before // 2
    assert gc.get_freeze_count() == 0


def test_an_unknown_request_cannot_be_aborted(engine):
    with pytest.raises(RequestError, match="no request 'nobody'"):
        engine.abort("nobody")


# -- what is stored --------------------------------------------------------------------------------


def test_a_prefix_is_stored_once_however_many_share_it(engine):
    for i in range(4):
        engine.submit(ask(f"r{i}", AGENT, text(10 + i, 6), new=30, shared_tokens=40))
    step_until_decoding(engine, 4)
    assert engine.cache.ledger.hot_tokens == 40
    rows = engine.scheduler.running
    assert [row.reservation.pages[:40].tolist() for row in rows] == [list(range(40))] * 4
    own = sum(row.kv_tokens.size - 40 for row in rows)
    assert engine.cache.ledger.cold_tokens == own
    assert engine.cache.index.size().prefix_tokens == 40


def test_a_prefix_that_hot_cannot_hold_is_still_read_once():
    engine = make_engine(hot_fraction=0.05)
    requests = [ask(f"r{i}", AGENT, text(10 + i, 6), shared_tokens=40) for i in range(4)]
    said = serve(engine, requests)
    assert {r.id: said[r.id] for r in requests} == {
        r.id: greedy_without_cache(r, said[r.id]) for r in requests
    }
    assert "paged" not in {step.backend for step in engine.metrics.steps if step.rows == 4}
    assert max(sample.hot_tokens for sample in engine.metrics.samples) == 0
    engine.check_integrity()


def test_with_all_of_the_pool_cold_a_prefix_is_still_stored_once():
    engine = make_engine("uniform16")
    for i in range(4):
        engine.submit(ask(f"r{i}", AGENT, text(10 + i, 6), new=30, shared_tokens=40))
    step_until_decoding(engine, 4)
    tables = [row.reservation.pages.tolist() for row in engine.scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1  # two full pages of 16
    assert len({table[2] for table in tables}) == 4
    engine.check_integrity()


# -- warm-up ---------------------------------------------------------------------------------------


def test_a_warm_engine_compiles_nothing_more(engine):
    engine.warmup()
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        requests = [
            ask("declared", AGENT, text(10, 6), shared_tokens=40),
            ask("undeclared", text(2, 30), text(11, 60)),
            ask("promotes", text(2, 30), text(12, 6)),
            ask("shares", AGENT, text(13, 6)),
            *(ask(f"fills{i}", text(20 + i, 60), new=50) for i in range(9)),
        ]
        serve(engine, requests)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.cache.ledger.lent > 0
    assert compiled == []


def test_warming_up_changes_nothing(engine):
    engine.submit(ask("runs", AGENT, text(10, 4), new=20, shared_tokens=40))
    events = engine.step()
    before = state(engine)
    engine.warmup()
    assert state(engine) == before
    tokens = tokens_of(events)["runs"] + serve(engine, [])["runs"]
    assert tokens == greedy_without_cache(ask("runs", AGENT, text(10, 4)), tokens)


def test_now_is_seconds_since_the_run_began(engine, monkeypatch):
    clock = Clock(monkeypatch)
    engine.run([])
    clock.now += 3.0
    assert math.isclose(engine.now, 3.0)
