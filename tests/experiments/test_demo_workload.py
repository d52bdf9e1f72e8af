"""The demo's workload on the real model: every system generates what a plain forward pass does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from configs import demo
from experiments import workloads
from experiments.running import engine_configs
from experiments.workloads import Target
from kvgrain_jax import Engine
from models import plain_attend

NEW_TOKENS = 6


@functools.cache
def real_model():
    return models.load("smollm2-135m", dtype="float32")


def requests_of_the_two_shorter_agents(longest):
    """Two requests of each of two agents, of their prompts the first tokens."""
    config = demo.get_config().to_dict()
    loaded = real_model()
    target = Target(loaded.model.vocabulary, loaded.model.max_context, loaded.tokenizer)
    requests = workloads.prepare(config["workload"])(target).requests
    shortest = sorted(requests, key=lambda request: request.shared_tokens)
    chosen = [
        *shortest[:2],
        *[r for r in shortest if r.shared_tokens > shortest[0].shared_tokens][:2],
    ]
    return [
        dataclasses.replace(
            request,
            prompt=request.prompt[: longest + i],
            shared_tokens=min(request.shared_tokens, longest - 16),
            max_new_tokens=NEW_TOKENS,
            arrival=0.0,
        )
        for i, request in enumerate(chosen)
    ]


@functools.cache
def plain_forward(context):
    loaded = real_model()

    @jax.jit
    def greedy(tokens, rows):
        positions = jnp.arange(context, dtype=jnp.int32)
        logits, _ = loaded.model.step(
            loaded.model.params, tokens, positions, None, plain_attend, rows=rows
        )
        return jnp.argmax(logits, axis=-1)

    return greedy


def greedy_continuation(prompt, generated, context):
    """Token that a forward pass without a cache puts at each generated position."""
    tokens = np.zeros(context, np.int32)
    tokens[: prompt.size] = prompt
    tokens[prompt.size : prompt.size + len(generated)] = generated
    rows = np.full(NEW_TOKENS, prompt.size - 1, np.int32)
    rows[: len(generated)] += np.arange(len(generated))
    return np.asarray(plain_forward(context)(tokens, rows))[: len(generated)].tolist()


# Both compile the model's 30 layers three times. `make demo` compares the systems with each other;
# tests/models/test_smollm2.py has the real weights without an engine.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "longest", "context"), [("dense", 96, 128), ("auto", 690, 704)]
)
def test_greedy_tokens_equal_a_forward_pass_without_any_cache(backend, longest, context):
    options = demo.get_config().to_dict()["engine"]
    options |= {"max_context": context, "max_batch": 4, "pool_tokens": 2048, "hot_fraction": 0.5}
    options |= {"backend": backend}
    engine = Engine(real_model().model, engine_configs(["kvgrain"], options)["kvgrain"])
    requests = requests_of_the_two_shorter_agents(longest)
    metrics = engine.run(requests)
    prompts = {request.id: np.asarray(request.prompt) for request in requests}
    assert len(metrics.requests) == 4
    for result in metrics.requests:
        want = greedy_continuation(prompts[result.id], result.tokens, context)
        assert list(result.tokens) == want, result.id
