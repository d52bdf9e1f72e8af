"""The engine's tokens are those of the model without any cache, whatever the storage and backend."""

import numpy as np
import pytest
from tiny_engine import (
    CHUNK,
    DECODE_STEPS,
    MODEL,
    OTHER_PARAMS,
    ask,
    greedy_without_cache,
    make_engine,
    serve,
    step_until_decoding,
    text,
    tokens_of,
    with_normed_heads,
)

from kvgrain_jax import KVGrainError, Request, SamplingParams

AGENT_A, AGENT_B, PERSONA, COMMON = text(1, 40), text(2, 23), text(3, 21), text(4, 33)

# Two classes of different lengths, prefixes within prefixes, declared ones and others, one prompt
# twice, prompts of one token and of more than two chunks, more requests than rows.
WORKLOAD = [
    ask("a1", AGENT_A, text(10, 5), shared_tokens=40),
    ask("b1", AGENT_B, text(11, 7), shared_tokens=23),
    ask("a2", AGENT_A, text(12, 12), shared_tokens=40),
    ask("a1 again", AGENT_A, text(10, 5), shared_tokens=40, new=14),
    ask("a with persona", AGENT_A, PERSONA, text(13, 3), shared_tokens=61),
    ask("persona too", AGENT_A, PERSONA, text(14, 6), shared_tokens=61),
    ask("one new token", AGENT_B, text(15, 2), new=1),
    ask("b2", AGENT_B, text(16, 9), new=11),
    ask("undeclared", COMMON, text(17, 4)),
    ask("undeclared too", COMMON, text(18, 6)),
    ask("long", text(19, 2 * CHUNK + 5), new=20),
    ask("one token", text(20, 1), new=17),
]

SYSTEMS = {
    "uniform16": ("uniform16", {}),
    "cascade16": ("cascade16", {}),
    "kvgrain": ("kvgrain", {}),
    "kvgrain without HOT": ("kvgrain", {"hot_fraction": 0.0}),
    "kvgrain, promotion at the third use": ("kvgrain", {"policy": "after_hits:3"}),
    "dense, pages of 4": ("kvgrain", {"backend": "dense", "page_size": 4}),
    "cascade, pages of 16": ("kvgrain", {"backend": "cascade", "page_size": 16}),
    "paged, pages of 16, with HOT": ("kvgrain", {"backend": "paged", "page_size": 16}),
    "prefill from copies of earlier tokens": ("kvgrain", {"hot_fraction": 0.0, "max_staged": 48}),
}


@pytest.fixture(scope="module")
def served():
    """Each system's engine and tokens, computed once for all tests of this file."""
    done = {}

    def get(name):
        if name not in done:
            system, options = SYSTEMS[name]
            engine = make_engine(system, **options)
            done[name] = engine, serve(engine, WORKLOAD)
        return done[name]

    return get


@pytest.mark.parametrize("name", SYSTEMS)
def test_greedy_tokens_are_those_of_a_forward_pass_without_cache(served, name):
    _, tokens = served(name)
    assert {r.id: len(tokens[r.id]) for r in WORKLOAD} == {r.id: r.max_new_tokens for r in WORKLOAD}
    for request in WORKLOAD:
        assert tokens[request.id] == greedy_without_cache(request, tokens[request.id]), request.id


def test_heads_that_are_normed_are_normed_in_the_cache_too():
    model = with_normed_heads()
    tokens = serve(make_engine(model=model), WORKLOAD[:4])
    for request in WORKLOAD[:4]:
        own = tokens[request.id]
        assert own == greedy_without_cache(request, own, model.params, model.step), request.id


def test_kvgrain_takes_every_backend_on_the_way(served):
    engine, _ = served("kvgrain")
    assert {step.backend for step in engine.metrics.steps} == {"dense", "cascade", "paged"}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("uniform16", "paged"),
        ("cascade16", "cascade16"),
        ("dense, pages of 4", "dense"),
        ("cascade, pages of 16", "cascade"),
        ("paged, pages of 16, with HOT", "paged"),
    ],
)
def test_a_system_of_one_backend_takes_no_other(served, name, backend):
    engine, _ = served(name)
    assert {step.backend for step in engine.metrics.steps} == {backend}


def test_cached_prefixes_are_not_computed_again(served):
    engine, _ = served("kvgrain")
    cached = {request.id: request.cached_tokens for request in engine.metrics.requests}
    assert cached["a2"] == 40
    assert cached["a1 again"] == 44  # all but the last token
    assert cached["persona too"] == 61
    assert cached["undeclared too"] == 33
    assert cached["long"] == cached["one token"] == 0


@pytest.mark.parametrize("name", ["kvgrain", "uniform16"])
def test_cached_and_fresh_tokens_are_equal(served, name):
    _, tokens = served(name)
    system, options = SYSTEMS[name]
    engine = make_engine(system, **options)
    page = engine.config.page_size
    for run in ("fresh", "cached"):
        for request in (WORKLOAD[1], WORKLOAD[4], WORKLOAD[9]):
            again = Request(run + request.id, request.prompt, request.max_new_tokens)
            assert serve(engine, [again])[run + request.id] == tokens[request.id]
            cached = engine.metrics.requests[-1].cached_tokens
            assert cached == (run == "cached") * ((len(request.prompt) - 1) // page * page)


def test_generated_tokens_are_a_cached_prefix_of_the_next_turn(served):
    engine, tokens = served("kvgrain")
    turn = ask("next turn", AGENT_B, text(16, 9), np.array(tokens["b2"]), text(30, 4))
    answer = serve(engine, [turn])["next turn"]
    # The last token that was generated was never fed, so its keys and values are not there.
    assert engine.metrics.requests[-1].cached_tokens == 32 + 11 - 1
    assert answer == greedy_without_cache(turn, answer)


def test_a_prefix_in_more_pieces_than_a_prefill_reads_as_such():
    engine = make_engine()
    cuts = [ask(f"cut at {n}", AGENT_A[:n], text(50 + n, 4), new=2) for n in (9, 17, 26, 33)]
    requests = [WORKLOAD[0], *cuts, ask("whole", AGENT_A, text(29, 30))]
    tokens = {}
    for request in requests[:-1]:
        tokens |= serve(engine, [request])
    engine.submit(requests[-1])
    first = step_until_decoding(engine, 1)
    (row,) = engine.scheduler.running
    assert len(engine.cache.contiguous_pieces(row.reservation)) == 5 > engine.config.max_pieces
    tokens["whole"] = tokens_of(first)["whole"] + serve(engine, [])["whole"]
    for request in requests:
        assert tokens[request.id] == greedy_without_cache(request, tokens[request.id])


@pytest.mark.parametrize(
    ("policy", "evicts_hot"), [("always", True), ("after_hits:2", False)], ids=["always", "2 hits"]
)
def test_tokens_are_right_while_pools_are_exhausted_lent_and_evicted(policy, evicts_hot):
    engine = make_engine("kvgrain", policy=policy)
    evicted, lent = set(), set()
    evict_one = engine.cache.index.evict_one

    def seen(pool):
        pieces = evict_one(pool)
        evicted.update(piece.is_hot for piece in pieces)
        return pieces

    engine.cache.index.evict_one = seen
    requests = []
    for i in range(12):
        agent = text(40 + i % 5, 44)
        shared = 44 if i % 2 else 0
        requests.append(ask(f"r{i}", agent, text(60 + i, 20), new=60, shared_tokens=shared))
    tokens = serve(engine, requests, after_step=lambda: lent.add(engine.cache.ledger.lent))
    assert evicted == {True, False} if evicts_hot else {False}
    assert len(lent) > 1
    for request in requests:
        assert len(tokens[request.id]) == 60
        assert tokens[request.id] == greedy_without_cache(request, tokens[request.id])


def test_smaller_batches_and_chunks_run_in_smaller_buckets():
    engine = make_engine("uniform16", batch_buckets=(2, 4), chunk_buckets=(16, CHUNK))
    requests = [ask(f"r{i}", text(70 + i, 9 + i)) for i in range(5)]
    tokens = serve(engine, requests)
    for request in requests:
        assert tokens[request.id] == greedy_without_cache(request, tokens[request.id])


def test_a_stop_token_ends_a_request_and_is_part_of_the_output(served):
    engine, tokens = served("kvgrain")
    prompt, whole = WORKLOAD[0].prompt, tokens["a1"]
    requests = [
        Request(f"stop {i}", prompt, 9, stop_tokens=(95, whole[i])) for i in range(len(whole))
    ]
    stopped = serve(engine, requests)
    for i, token in enumerate(whole):
        assert stopped[f"stop {i}"] == whole[: whole.index(token) + 1]
    reasons = {r.id: r.reason for r in engine.metrics.requests}
    assert reasons["stop 3"] == "stop"
    assert reasons["a1"] == "length"


def sampled(name: str, seed: int) -> Request:
    sampling = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, seed=seed)
    return ask(name, AGENT_A, text(seed, 6), sampling=sampling, shared_tokens=40, new=12)


def test_sampled_tokens_depend_on_the_seed_alone():
    company = [sampled(f"s{i}", 80 + i) for i in range(5)]
    tokens = {
        name: serve(make_engine(*args), company)
        for name, args in {"kv": ("kvgrain",), "16": ("uniform16",), "c": ("cascade16",)}.items()
    }
    assert tokens["kv"] == tokens["16"] == tokens["c"]
    alone = serve(make_engine(), [sampled("s3", 83)])
    assert alone["s3"] == tokens["kv"]["s3"]
    assert alone["s3"] != greedy_without_cache(company[3], alone["s3"])


def test_new_weights_forget_every_cached_prefix():
    engine = make_engine()
    serve(engine, WORKLOAD[:2])
    engine.update_params(OTHER_PARAMS)
    assert engine.cache.index.size().nodes == 0
    request = ask("new", AGENT_A, text(10, 5))
    tokens = serve(engine, [request])["new"]
    assert engine.metrics.requests[-1].cached_tokens == 0
    assert tokens == greedy_without_cache(request, tokens, OTHER_PARAMS)
    assert tokens != greedy_without_cache(request, tokens, MODEL.params)


def test_weights_do_not_change_under_a_running_request():
    engine = make_engine()
    engine.submit(WORKLOAD[0])
    engine.step()
    with pytest.raises(KVGrainError, match="Requests are running"):
        engine.update_params(OTHER_PARAMS)
    tokens = serve(engine, [])
    engine.check_integrity()
    rest = tokens["a1"]
    whole = engine.metrics.requests[-1].tokens
    assert whole[-len(rest) :] == rest
    assert len(rest) == 9 - 1 - DECODE_STEPS
    assert whole == greedy_without_cache(WORKLOAD[0], whole)
