"""A tiny random model behind the engine over head groups, and the budgets of its heads."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgrain_jax import Request, TokenEvent
from kvgrain_jax.budgets import BudgetPlan, HeadGroups, make_groups
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.budgets.engine_config import HeadEngineConfig
from kvgrain_jax.budgets.gates import Gate
from models import ModelConfig, as_model, plain_attend, random_params

CONFIG = ModelConfig(
    layers=2,
    d_model=32,
    ffn=48,
    heads=8,
    kv_heads=4,
    head_dim=16,
    vocabulary=96,
    max_context=256,
    rope_theta=1e4,
)
MODEL = as_model(CONFIG, random_params(CONFIG, jnp.float32, seed=5))
_NORMED = dataclasses.replace(CONFIG, qk_norm=True)
NORMED_HEADS = as_model(_NORMED, random_params(_NORMED, jnp.float32, seed=5))  # of Qwen3's kind
VECTOR_BYTES = 2 * 16 * 4  # key and value of one token and head, float32
MAX_CONTEXT, CHUNK, SINKS, WINDOW = 96, 16, 2, 4
# Unequal on purpose: 1/16 to all of what is not protected.
DEMANDS = np.array([[1.0, 0.4, 0.1, 0.7], [0.2, 1.0, 0.05, 0.3]])
SNAPKV = ChunkScorer("snapkv", queries=8, neighbours=5)


def budgets(retention: float, demands: np.ndarray = DEMANDS) -> BudgetPlan:
    return BudgetPlan(demands, retention, sinks=SINKS, window=WINDOW)


@functools.cache  # programs are compiled for the groups they are given
def groups_of(group_size: int, scope: str = "global") -> HeadGroups:
    return make_groups(DEMANDS, group_size, scope=scope)  # pyright: ignore[reportArgumentType]


def make_engine(
    retention: float = 1.0,
    *,
    group_size: int = 2,
    scope: str = "global",
    demands: np.ndarray = DEMANDS,
    engine: type[HeadEngine] = HeadEngine,
    model=MODEL,
    gates: Gate | None = None,
    **options,
) -> HeadEngine:
    shape: dict[str, Any] = {
        "pool_bytes": 600 * 4 * 2 * VECTOR_BYTES,
        "page_size": 4,
        "scorer": ChunkScorer("key_norm"),
        "max_context": MAX_CONTEXT,
        "max_batch": 3,
        "chunk_tokens": CHUNK,
        "decode_steps": 4,
    }
    config = HeadEngineConfig(**(shape | options))
    groups = groups_of(group_size, scope)
    return engine(model, budgets(retention, demands), groups, config, gates)


def occupy(engine: HeadEngine, free: int) -> None:
    """Take pages out of circulation: ``free`` are left of a pool of the usual shape.

    Nobody owns them, so the pool's integrity cannot be checked afterwards.
    """
    left = engine.ledger.free - free
    while left:
        counts = np.zeros(engine.groups.n_groups, np.int64)
        counts[0] = min(left, MAX_CONTEXT // engine.config.page_size)
        assert engine.ledger.reserve(counts) is not None
        left -= counts[0]


def text(seed: int, n: int) -> np.ndarray:
    """``n`` tokens of their own for each seed."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocabulary, n)


def ask(name: str, prompt: np.ndarray, new: int = 6, **fields) -> Request:
    return Request(name, prompt, new, **fields)


def serve(
    engine: HeadEngine, requests: Iterable[Request] = (), *, check: bool = True
) -> dict[str, tuple[int, ...]]:
    """Serve requests that are all there at once, checking the pool after each step."""
    for request in requests:
        engine.submit(request)
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        collect(engine.step(), tokens)
        if check:
            engine.check_integrity()
    return tokens


def collect(events: Iterable[TokenEvent], tokens: dict[str, tuple[int, ...]]) -> None:
    for event in events:
        tokens[event.id] = tokens.get(event.id, ()) + event.tokens


def say(engine: HeadEngine, name: str, prompt: np.ndarray, conversation: str, **fields):
    """One turn of a conversation."""
    engine.submit(ask(name, prompt, **fields), conversation=conversation)
    return serve(engine, check=False)[name]


@functools.partial(jax.jit, static_argnums=0)
def _plain_logits(step, params, tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return step(params, tokens, positions, None, plain_attend)[0]


def greedy_without_cache(prompt: np.ndarray, tokens, model=MODEL) -> tuple[int, ...]:
    """The most likely token behind the prompt and behind each of the ``tokens`` but the last."""
    context = np.zeros(MAX_CONTEXT, np.int32)
    written = np.concatenate([np.asarray(prompt), np.asarray(tokens, np.int64)])
    context[: written.size] = written
    best = np.asarray(_plain_logits(model.step, model.params, context)).argmax(axis=1)
    return tuple(int(token) for token in best[prompt.size - 1 :][: len(tokens)])


def held_tokens(engine: HeadEngine, index: int = 0) -> dict[tuple[int, int], dict[int, np.ndarray]]:
    """Key and value, one behind the other, of every token that each head of a row holds."""
    row, kv, groups = engine.scheduler.row(index), engine.ledger.kv, engine.groups
    assert row.holding is not None
    table, page = np.asarray(row.holding.table), engine.config.page_size
    vectors = np.concatenate([np.asarray(kv.k), np.asarray(kv.v)], axis=-1)
    positions = np.asarray(kv.positions)
    held = row.plans[-1].after + max(0, len(row.tokens) - 1)
    found = {}
    for layer, head in np.ndindex(held.shape):
        group, column = groups.group_of[layer, head], groups.place_of[layer, head]
        places = np.arange(int(held[layer, head]))
        slots = table[group][places // page] * page + places % page
        found[layer, head] = {int(positions[slot, column]): vectors[slot, column] for slot in slots}
    return found
