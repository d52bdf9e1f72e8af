"""Pools, prefix index and scheduler under random use: every slot is right after every step."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_simulation import ANY_SHARED, Simulation

POLICIES = ["always", "after_hits:2"]


class EngineUnderRandomUse(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        policy=st.sampled_from(POLICIES),
        min_pages=st.integers(0, 2),
        waits=st.booleans(),
        patience=st.sampled_from([0, 1, 5]),
    )
    def start(
        self, page_size: int, policy: str, min_pages: int, waits: bool, patience: int
    ) -> None:
        min_shared = max(1, min_pages * page_size) if waits else ANY_SHARED
        self.it = Simulation(page_size, policy, min_pages, min_shared, patience)

    @rule(
        letters=st.text("abc", min_size=0, max_size=9),
        tail=st.integers(0, 15),
        new_pages=st.integers(0, 3),
        shared_pages=st.integers(0, 9),
        stops=st.booleans(),
    )
    def submit(
        self, letters: str, tail: int, new_pages: int, shared_pages: int, stops: bool
    ) -> None:
        self.it.submit(letters, tail, new_pages, shared_pages, stops)

    @rule()
    def admit(self) -> None:
        self.it.admit()

    @rule()
    def prefill(self) -> None:
        self.it.prefill()

    @rule(n_steps=st.integers(1, 6), token=st.sampled_from([1, 2]))
    def decode(self, n_steps: int, token: int) -> None:
        self.it.decode(n_steps, token)

    @rule(token=st.sampled_from([1, 2]))
    def step(self, token: int) -> None:
        self.it.step(token)

    @precondition(lambda self: self.it.line or self.it.scheduler.running)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        ids = [row.request.id for row in self.it.scheduler.running]
        self.it.abort(data.draw(st.sampled_from(ids + [r.id for r in self.it.line])))

    @rule()
    def drop_all(self) -> None:
        self.it.drop_all()

    @invariant()
    def everything_agrees(self) -> None:
        self.it.check()

    def teardown(self) -> None:
        if hasattr(self, "it"):
            self.it.run_to_the_end()


EngineUnderRandomUse.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngineUnderRandomUse = EngineUnderRandomUse.TestCase


@pytest.mark.slow
def test_random_use_comes_to_everything_that_can_happen():
    """With fixed seeds, so that what the machine above is meant to find is known to occur."""
    events: Counter[str] = Counter()
    for page_size in (1, 4, 16):
        for seed, policy in enumerate(["always", "after_hits:2", "always"]):
            events += run_at_random(seed, page_size, policy)
    assert {event for event, count in events.items() if count} >= {
        "no room",
        "eviction from cold",
        "eviction from hot",
        "lending",
        "taking back",
        "COLD fallback",
        "duplicate",
        "rejected HOT tail",
        "promotion under a decoding row",
        "abort while waiting",
        "abort in prefill",
        "abort in decode",
        "auto plan with several segments",
        "auto plan with a segment of several rows",
        "cascade16 plan with a segment of several rows",
    }


def test_a_request_waits_while_another_computes_its_prefix():
    assert run_at_random(1, 4, "always", min_shared=4)["request waits for a prefix"] > 0


def test_a_request_whose_prefix_is_cached_goes_before_others():
    assert run_at_random(1, 4, "always", min_shared=4, patience=2)["cached request goes first"] > 0


def run_at_random(
    seed: int, page_size: int, policy: str, min_shared: int = ANY_SHARED, patience: int = 0
) -> Counter[str]:
    rng = random.Random(seed)
    it = Simulation(page_size, policy, min_pages=0, min_shared=min_shared, patience=patience)
    for _ in range(40):
        for _ in range(rng.randrange(3)):
            letters = "".join(rng.choices("aabc", k=rng.randrange(9)))
            it.submit(
                letters,
                tail=rng.randrange(16),
                new_pages=rng.randrange(4),
                shared_pages=rng.randrange(9),
                stops=rng.random() < 0.3,
            )
        it.step(rng.choice([1, 2]))
        ids = [row.request.id for row in it.scheduler.running] + [r.id for r in it.line]
        if ids and rng.random() < 0.3:
            it.abort(rng.choice(ids))
        it.check()
    it.run_to_the_end()
    return it.events
