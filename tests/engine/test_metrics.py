"""What a run reports: times by a clock of the test, bytes and backends counted by hand."""

import math

import numpy as np
import pytest
from tiny_engine import GROUP, TOKEN_BYTES, ask, make_engine, text

from kvgrain_jax.engine import RequestMetrics, RunMetrics, serving
from kvgrain_jax.engine.metrics import Sample, StepTrace, percentile

AGENT = text(1, 40)


class Clock:
    """A second passes for every event that is streamed."""

    def __init__(self, monkeypatch):
        self.now = 500.0
        monkeypatch.setattr(serving, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def on_event(self, event) -> None:
        self.now += 1.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def by_id(metrics: RunMetrics) -> dict[str, RequestMetrics]:
    return {request.id: request for request in metrics.requests}


# -- times -----------------------------------------------------------------------------------------


def test_first_token_time_is_that_of_the_first_token_not_of_the_whole_answer(monkeypatch):
    clock = Clock(monkeypatch)
    # The first step gives the first token and four more at second 0, in two events; the next
    # ones, at seconds 2 and 3, four each.
    metrics = make_engine().run([ask("r", AGENT, new=13)], clock.on_event)
    (request,) = metrics.requests
    assert (request.ttft, request.finish) == (0.0, 3.0)
    assert request.tpot == 3.0 / 12


def test_time_to_first_token_counts_from_arrival_and_waiting_is_part_of_it(monkeypatch):
    clock = Clock(monkeypatch)
    requests = [ask(f"r{i}", text(10 + i, 5), new=6) for i in range(4)]
    waits = ask("waits", text(20, 5), new=6, arrival=0.5)
    metrics = make_engine().run([*requests, waits], clock.on_event)
    request = by_id(metrics)["waits"]
    # Four rows are taken until two events of each have been streamed and one more each has come.
    assert request.first_token == 11.0
    assert request.ttft == 10.5


def test_a_single_token_has_no_time_per_output_token(monkeypatch):
    Clock(monkeypatch)
    metrics = make_engine().run([ask("r", AGENT, new=1)])
    assert math.isnan(metrics.requests[0].tpot)
    assert math.isnan(metrics.summary()["tpot_p50_s"])
    assert metrics.steps == []


# -- backends --------------------------------------------------------------------------------------


def test_every_step_names_its_backend_and_the_rows_it_was_chosen_for():
    engine = make_engine()  # dense from three rows on
    requests = [
        ask(f"r{i}", AGENT, text(10 + i, 5), new=10 + 6 * i, shared_tokens=40) for i in range(4)
    ]
    metrics = engine.run(requests)
    assert {step.rows for step in metrics.steps} == {1, 2, 3, 4}
    for step in metrics.steps:
        assert step.m_eff == GROUP * step.rows
        assert step.backend == ("dense" if step.rows >= 3 else "cascade")
    alone = engine.run([ask("unshared", text(30, 9))])
    assert {step.backend for step in alone.steps} == {"paged"}


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "options", "stored", "read"),
    [
        ("kvgrain", {}, 40, 40),
        ("kvgrain", {"backend": "paged", "page_size": 16}, 32, 3 * 32),
        ("kvgrain", {"hot_fraction": 0.0}, 40, 3 * 40),  # no slab: each row reads its pages
        ("uniform16", {}, 32, 3 * 32),  # two full pages of 16
        ("cascade16", {}, 32, 32),
    ],
)
def test_prefix_bytes_are_read_once_or_once_a_row(system, options, stored, read):
    requests = [
        ask(f"r{i}", AGENT, np.array([i]), text(10, 20), new=20, shared_tokens=40) for i in range(3)
    ]
    metrics = make_engine(system, **options).run(requests)
    assert metrics.summary()["prefix_bytes_stored"] == stored * TOKEN_BYTES
    together = [step for step in metrics.steps if step.rows == 3]
    assert len(together) > 8
    summary = RunMetrics(metrics.kv_bytes_per_token, steps=together).summary()
    assert summary["prefix_bytes_read_per_step"] == read * TOKEN_BYTES
    # One row of the three has left: once for both that are left, or once for each of them.
    of_two = {step.prefix_tokens_read for step in metrics.steps if step.rows == 2}
    assert of_two == {stored if read == stored else 2 * stored}


def test_nested_prefixes_are_read_once_each():
    persona = text(2, 24)
    requests = [
        ask("a", AGENT, text(10, 5), new=24, shared_tokens=40),
        ask("p", AGENT, persona, text(11, 5), new=24, shared_tokens=64),
        ask("q", AGENT, persona, text(12, 5), new=24, shared_tokens=64),
    ]
    metrics = make_engine().run(requests)
    step = next(step for step in metrics.steps if step.rows == 3)
    assert step.prefix_tokens_read == 40 + 24
    assert max(sample.prefix_tokens for sample in metrics.samples) == 64


def test_samples_count_what_lies_in_hot_and_cold():
    metrics = make_engine().run([ask("r", AGENT, text(10, 5), new=9, shared_tokens=40)])
    first, last = metrics.samples
    assert (first.running, first.waiting) == (1, 0)
    assert (first.hot_tokens, first.prefix_tokens, first.lent_tokens) == (40, 40, 0)
    assert first.cold_tokens == 5 + 4
    assert last.running == 0
    assert last.cold_tokens == 5 + 8  # cached: all but the last token, which was never fed


# -- the summary -----------------------------------------------------------------------------------


def request(name: str, arrival: float, first: float, finish: float, n: int) -> RequestMetrics:
    return RequestMetrics(name, arrival, first, finish, 10, 4, (0,) * n, "length")


def test_summary_adds_up():
    metrics = RunMetrics(
        kv_bytes_per_token=100,
        requests=[request("a", 0.0, 1.0, 3.0, 5), request("b", 1.0, 4.0, 5.0, 3)],
        samples=[Sample(1.0, 2, 1, 8, 20, 0, 6), Sample(2.0, 1, 0, 12, 10, 4, 9)],
        steps=[StepTrace("dense", 2, 6, "", 6), StepTrace("paged", 1, 3, "", 0)],
    )
    assert metrics.summary() == {
        "requests": 2,
        "prompt_tokens": 20,
        "cached_tokens": 8,
        "output_tokens": 8,
        "duration_s": 5.0,
        "output_tokens_per_s": 8 / 5.0,
        "ttft_p50_s": 2.0,
        "ttft_p99_s": pytest.approx(1.0 + 0.99 * 2.0),
        "tpot_p50_s": 0.5,
        "tpot_p99_s": 0.5,
        "decode_steps": 2,
        "backend_fractions": {"dense": 0.5, "paged": 0.5},
        "peak_hot_tokens": 12,
        "peak_cold_tokens": 20,
        "peak_running": 2,
        "prefix_bytes_stored": 900,
        "prefix_bytes_read_per_step": 300.0,
    }


def test_summary_of_a_run_of_nothing():
    summary = RunMetrics(kv_bytes_per_token=1).summary()
    assert summary["output_tokens_per_s"] == 0.0
    assert summary["backend_fractions"] == {}
    assert math.isnan(summary["ttft_p50_s"])


def test_percentiles_leave_out_what_is_no_number():
    assert percentile([1.0, math.nan, 3.0], 50) == 2.0
    assert math.isnan(percentile([math.nan], 50))


def test_the_bytes_of_a_token_are_keys_and_values_of_all_layers():
    assert make_engine().metrics.kv_bytes_per_token == TOKEN_BYTES
