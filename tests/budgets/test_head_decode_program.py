"""The compiled programs over head groups: no copy of the pool, no transfer, no recompilation."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_head_engine import MODEL, ask, collect, make_engine, serve, text

from kvgrain_jax.budgets import decode
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.budgets.prefill import PromptChunk, prefill_chunk
from kvgrain_jax.budgets.shared import share_rows

N_ROWS, MAX_STEPS = 3, 4


@pytest.fixture(scope="module")
def engine() -> HeadEngine:
    """Two requests that decode."""
    engine = make_engine(0.4)
    for i in range(2):
        engine.submit(ask(f"r{i}", text(i, 30), new=40))
    while sum(row.decoding for row in engine.scheduler.running) < 2:
        engine.step()
    return engine


def loop_arguments(engine: HeadEngine):
    args = (MODEL.params, engine.ledger.kv, engine.device.batch, jnp.int32(4), jnp.int32(N_ROWS))
    static = {
        "step": MODEL.step,
        "n_rows": N_ROWS,
        "max_steps": MAX_STEPS,
        "groups": engine.groups,
        "scorer": engine.config.scorer,
        "greedy": False,
        "page_size": engine.config.page_size,
    }
    return args, static


def chunk_arguments(engine: HeadEngine):
    row = engine.scheduler.row(0)
    assert row.holding is not None
    tokens = jnp.zeros(engine.config.chunk_tokens, jnp.int32)
    lengths = engine.device.by_group(row.plans[0].after)
    one, two = jnp.int32(1), jnp.int32(2)
    chunk = PromptChunk(tokens, first=jnp.int32(30), n_tokens=two, keep_before=two, window=one)
    table = row.holding.table
    args = (
        MODEL.params,
        engine.ledger.kv,
        table,
        lengths,
        lengths,
        chunk,
        engine.device._row_of(row),
    )
    static = {
        "step": MODEL.step,
        "groups": engine.groups,
        "scorer": engine.config.scorer,
        "greedy": False,
        "page_size": engine.config.page_size,
        "selects": True,
        "kernels": None,
        "shrinks": True,
        "max_context": engine.max_context,
    }
    return args, static


def shared_loop_arguments(engine: HeadEngine):
    args, static = loop_arguments(engine)
    shared = share_rows(
        [None] * N_ROWS,
        n_layers=MODEL.n_layers,
        n_kv_heads=MODEL.n_kv_heads,
        n_rows_of_slabs=640,
        n_rows_of_pool=engine.ledger.geometry.n_rows,
    )
    return (*args, None, shared), static


def pool_sized(function, args, static, donated: tuple[int, ...], n_elements: int) -> list[str]:
    """Operations of the optimised program, inside fusions too, as large as the pool or larger."""
    flat, tree = jax.tree.flatten(tuple(args[i] for i in donated))

    def of_leaves(flat):  # plain arrays: lowering puts other objects into dataclasses
        full = list(args)
        for i, value in zip(donated, jax.tree.unflatten(tree, flat), strict=True):
            full[i] = value
        return jax.tree.leaves(function(*full, **static))

    program = jax.jit(of_leaves, donate_argnums=0).lower(flat).compile().as_text()
    assert program is not None
    results = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", program)
    return [
        name
        for shape, name in results
        if math.prod(int(size) for size in shape.split(",")) >= n_elements
    ]


@pytest.mark.parametrize(
    ("function", "arguments", "donated"),
    [
        (decode.decode_loop, loop_arguments, (1, 2)),
        pytest.param(
            *(decode.decode_loop, shared_loop_arguments, (1, 2)),
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 12),
                reason="XLA of jax 0.11 copies a slab array to a layout that only differs in a "
                "dimension of 1.",
            ),
        ),
        (prefill_chunk, chunk_arguments, (1,)),
    ],
    ids=["decode", "decode with shared prefixes", "prefill"],
)
def test_optimised_program_holds_no_copy_of_a_pool_sized_array(
    engine, function, arguments, donated
):
    args, static = arguments(engine)
    names = pool_sized(function, args, static, donated, engine.ledger.kv.k.size)
    assert "parameter" in names  # the pool is in the program
    moves = ("copy", "transpose", "convert", "concatenate", "broadcast")
    assert [name for name in names if name.startswith(moves)] == []


def test_loop_runs_without_a_host_transfer():
    engine, tokens = make_engine(0.4), {}
    engine.submit(ask("r", text(1, 20), new=30))
    while not tokens:
        collect(engine.step(), tokens)
    args, static = loop_arguments(engine)
    with jax.transfer_guard("disallow"):
        _, _, trace = decode.decode_loop(*args, **static)
        jax.block_until_ready(trace)
    assert int(trace.n_steps) == 4
    assert np.all(np.array(trace.tokens)[:, 0] >= 0)
    assert np.all(np.array(trace.tokens)[:, 1:] == -1)


def test_requests_of_any_length_share_the_programs():
    serve(make_engine(0.4), [ask("r", text(1, 40), new=6)])
    before = decode.decode_loop._cache_size(), prefill_chunk._cache_size()  # pyright: ignore
    serve(make_engine(0.3), [ask(f"r{i}", text(i, 9 + 20 * i), new=3 + i) for i in range(4)])
    assert (decode.decode_loop._cache_size(), prefill_chunk._cache_size()) == before  # pyright: ignore


@pytest.mark.parametrize("turns", ["first_prompt_only", "rebudget"])
def test_after_warmup_no_turn_of_a_conversation_compiles_a_program(turns):
    engine = make_engine(0.4, turns=turns)
    engine.warmup()
    before = decode.decode_loop._cache_size(), prefill_chunk._cache_size()  # pyright: ignore
    for name in ("first", "second"):
        engine.submit(ask(name, text(3, 40), 4), conversation="talk")
        while engine.has_work:
            engine.step()
    assert (decode.decode_loop._cache_size(), prefill_chunk._cache_size()) == before  # pyright: ignore
