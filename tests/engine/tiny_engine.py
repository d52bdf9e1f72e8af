"""A tiny random model behind the engine, and what the same model says without any cache.

All engines here have pools and batches of one shape, so that programs compiled by one test serve
the others.
"""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvgrain_jax import Engine, Request, TokenEvent, system_config
from kvgrain_jax.engine import Model
from models import ModelConfig, as_model, plain_attend, random_params

CONFIG = ModelConfig(
    layers=2,
    d_model=48,
    ffn=64,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vocabulary=96,
    max_context=256,
    rope_theta=1e4,
)
GROUP = 3
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head dim, float32
POOL_TOKENS, MAX_CONTEXT, MAX_BATCH, CHUNK, DECODE_STEPS = 416, 128, 4, 48, 4
MODEL = as_model(CONFIG, random_params(CONFIG, jnp.float32, seed=3))
OTHER_PARAMS = random_params(CONFIG, jnp.float32, seed=4)


def with_normed_heads() -> Model:
    """The model of Qwen3's kind: queries and keys are normed; gains are drawn, else they are ones."""
    config = dataclasses.replace(CONFIG, qk_norm=True)
    params = random_params(config, jnp.float32, seed=3)
    rng = np.random.default_rng(5)
    for name in [
        name for name in params if name.endswith(("query_norm.weight", "key_norm.weight"))
    ]:
        params[name] = jnp.asarray(rng.uniform(0.5, 3, CONFIG.head_dim), jnp.float32)
    return as_model(config, params)


def make_engine(system: str = "kvgrain", model: Model = MODEL, **options) -> Engine:
    """The dispatch rule takes ``dense`` from three rows on, so that few requests reach it."""
    shape = {
        "pool_tokens": POOL_TOKENS,
        "max_context": MAX_CONTEXT,
        "max_batch": MAX_BATCH,
        "chunk_tokens": CHUNK,
        "chunk_requests": 3,
        "decode_steps": DECODE_STEPS,
        "min_hot_tokens": 8,
        "slab_align": 16,
        "max_slabs": 8,
        "max_segments": 6,
        "max_pieces": 3,
        "m_sat": 3 * GROUP,
        "hot_fraction": 0.25,
    }
    return Engine(model, system_config(system, **(shape | options)))


def text(seed: int, n: int) -> np.ndarray:
    """``n`` tokens of their own for each seed."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocabulary, n)


def ask(name: str, *parts: np.ndarray, new: int = 9, **fields) -> Request:
    return Request(name, np.concatenate(parts), new, **fields)


def serve(
    engine: Engine, requests: Iterable[Request], after_step: Callable[[], object] = int
) -> dict[str, tuple[int, ...]]:
    """Serve requests that are all there at once, checking everything after each step."""
    for request in requests:
        engine.submit(request)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
        after_step()
    return tokens_of(events)


def tokens_of(events: Iterable[TokenEvent]) -> dict[str, tuple[int, ...]]:
    """What streaming gave each request."""
    tokens: dict[str, tuple[int, ...]] = {}
    for event in events:
        tokens[event.id] = tokens.get(event.id, ()) + event.tokens
    return tokens


def step_until_decoding(engine: Engine, n_rows: int) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.scheduler.n_decoding < n_rows:
        assert engine.has_work, f"all requests ended before {n_rows} decoded at once"
        events += engine.step()
    return events


@partial(jax.jit, static_argnums=0)
def _plain_logits(step, params, tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return step(params, tokens, positions, None, plain_attend)[0]


def greedy_without_cache(
    request: Request, tokens, params=MODEL.params, step=MODEL.step
) -> tuple[int, ...]:
    """The most likely token behind the prompt and behind each of the ``tokens`` but the last.

    Equal to ``tokens`` if and only if these are what a plain forward pass generates.
    """
    context = np.zeros(MAX_CONTEXT, np.int32)
    written = np.concatenate([np.asarray(request.prompt), np.asarray(tokens, np.int32)])
    context[: written.size] = written
    logits = np.asarray(_plain_logits(step, params, context))
    best = logits.argmax(axis=1)
    return tuple(int(token) for token in best[np.asarray(request.prompt).size - 1 :][: len(tokens)])
