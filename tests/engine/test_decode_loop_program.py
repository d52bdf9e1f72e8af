"""The compiled programs: no copy of a pool, no host transfer, no recompilation."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import CONFIG, DECODE_STEPS, MODEL, ask, make_engine, text

from kvgrain_jax import Request
from kvgrain_jax.engine import batch as batches
from kvgrain_jax.engine.decode_loop import decode_loop

# The first dimension of no other array in the programs, and more than a tile of keys, of which the
# specification makes copies.
POOL_TOKENS = 1040
POOL_SIZE = POOL_TOKENS * CONFIG.kv_heads * CONFIG.head_dim


def serve_two(engine):
    """Two requests with a common prefix, prefilled and decoding, in the order of the plan."""
    prefix = text(1, 40)
    for i in range(2):
        engine.submit(ask(f"r{i}", prefix, text(2 + i, 5), new=40, shared_tokens=40))
    while engine.scheduler.n_decoding < 2:
        engine.step()
    assert engine.scheduler.sort() is None


def arguments(engine, n_rows=4, n_steps=4):
    """What the engine passes to the loop."""
    device, ledger = engine.device, engine.cache.ledger
    plan = device.plan(engine.scheduler.rows[:n_rows])
    args = (
        device.params,
        ledger.kv,
        ledger.pools.cold,
        device.batch,
        plan.device,
        jnp.asarray(plan.choices.table),
        jnp.int32(n_steps),
        jnp.int32(n_rows),
    )
    static = {
        "step": MODEL.step,
        "n_rows": n_rows,
        "max_steps": engine.config.decode_steps,
        "backends": plan.choices.backends,
        "page_size": engine.cache.geometry.page_size,
    }
    return args, static


def optimised(function, argument, **options) -> str:
    """Text of a jitted function of one argument as XLA has optimised it."""
    program = jax.jit(function, **options).lower(argument).compile().as_text()
    assert program is not None
    return program


def optimised_loop(args, static) -> str:
    """The decode loop with pools and batch donated, as the engine calls it."""
    params, kv, pool, batch, *others = args
    donated, tree = jax.tree.flatten((kv, pool, batch))

    def flat(donated):  # of plain arrays: lowering puts other objects into dataclasses
        return jax.tree.leaves(
            decode_loop(params, *jax.tree.unflatten(tree, donated), *others, **static)
        )

    return optimised(flat, donated, donate_argnums=0)


def pool_sized(program: str) -> list[str]:
    """Names of the operations, inside fusions too, whose result is as large as a pool or larger."""
    results = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", program)
    return [
        name
        for shape, name in results
        if math.prod(int(size) for size in shape.split(",")) >= POOL_SIZE
    ]


@pytest.mark.parametrize("system", ["uniform16", "cascade16", "kvgrain"])
def test_optimised_program_holds_no_copy_of_a_pool_sized_array(system):
    engine = make_engine(system, pool_tokens=POOL_TOKENS)
    names = pool_sized(optimised_loop(*arguments(engine)))
    assert "parameter" in names  # the pools are in the program
    moves = ("copy", "transpose", "convert", "concatenate", "broadcast")
    assert [name for name in names if name.startswith(moves)] == []


def test_program_has_no_constant_without_elements():
    # The partitioner of jaxlib 0.11.2 crashes on one when the program is cut over several devices.
    args, static = arguments(make_engine())
    constants = decode_loop.trace(*args, **static).jaxpr.consts
    assert [constant for constant in constants if np.size(constant) == 0] == []


def test_a_copy_of_a_pool_would_be_seen():
    def write(pool):  # the pool is not donated, so it must be copied before the write
        return pool.at[3].set(1.0)

    pool = jnp.zeros((POOL_TOKENS, CONFIG.kv_heads, CONFIG.head_dim))
    assert "copy" in pool_sized(optimised(write, pool))
    assert "copy" not in pool_sized(optimised(write, pool, donate_argnums=0))


def test_loop_runs_without_a_host_transfer():
    engine = make_engine()
    serve_two(engine)
    args, static = arguments(engine)
    with jax.transfer_guard("disallow"):
        _, _, _, trace = decode_loop(*args, **static)
        jax.block_until_ready(trace)
    assert int(trace.n_steps) == 4


def test_a_host_transfer_would_be_refused():
    add = jax.jit(lambda x: x + 1)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-devic"):
        add(np.zeros(3, np.float32))


def test_new_plan_batch_and_step_count_do_not_recompile():
    engine = make_engine()
    engine.warmup()
    before = decode_loop._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    serve_two(engine)
    while engine.has_work:
        engine.step()
    for i in range(3):
        engine.submit(ask(f"n{i}", text(10 + i, 70 + i)))
    while engine.has_work:
        engine.step()
    assert {step.backend for step in engine.metrics.steps} == {"cascade", "paged"}
    assert decode_loop._cache_size() == before  # pyright: ignore[reportAttributeAccessIssue]


def test_too_few_free_pages_stop_the_loop_and_nothing_of_that_step_is_done():
    engine = make_engine(hot_fraction=0.0)
    serve_two(engine)
    (params, kv, pool, batch, plan, choices, _, quota), static = arguments(engine)
    lengths, pages = np.array(batch.lengths), np.array(batch.pages)
    keys = np.array(kv.k[1])
    n_free = 2 * 3 + 1  # two rows take a page each for three steps; one page is left over
    popped = np.array(pool.free)[int(pool.n_free) - 6 : int(pool.n_free)]
    free = np.roll(np.array(pool.free), n_free - int(pool.n_free))
    pool = dataclasses.replace(pool, free=jnp.asarray(free), n_free=jnp.int32(n_free))
    kv, pool, batch, trace = decode_loop(
        params, kv, pool, batch, plan, choices, jnp.int32(DECODE_STEPS), quota, **static
    )
    assert bool(trace.starved)
    assert int(trace.n_steps) == 3
    assert int(pool.n_free) == 1
    assert np.array(batch.lengths)[:2].tolist() == (lengths[:2] + 3).tolist()
    assert np.array(batch.active).tolist() == [True, True, False, False]
    assert np.all(np.array(trace.tokens)[3:] == -1)
    # Keys were written to the six pages that were taken, page tables grew by them, that is all.
    changed = np.flatnonzero(np.any(np.array(kv.k[1]) != keys, axis=(1, 2)))
    assert changed.tolist() == sorted(popped.tolist())
    changed = np.argwhere(np.array(batch.pages) != pages)
    assert sorted(np.array(batch.pages)[tuple(changed.T)]) == sorted(popped.tolist())
    assert {(row, column - lengths[row]) for row, column in changed} == {
        (row, step) for row in range(2) for step in range(3)
    }


def test_loop_that_starves_at_once_changes_nothing():
    engine = make_engine(hot_fraction=0.0)
    serve_two(engine)
    (params, kv, pool, batch, plan, choices, _, quota), static = arguments(engine)
    pool = dataclasses.replace(pool, n_free=jnp.int32(1))
    before = jax.tree.map(np.array, jax.tree.leaves((kv, pool, batch)))
    kv, pool, batch, trace = decode_loop(
        params, kv, pool, batch, plan, choices, jnp.int32(4), quota, **static
    )
    assert bool(trace.starved)
    assert int(trace.n_steps) == 0
    for old, new in zip(before, jax.tree.leaves((kv, pool, batch)), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(("max_finished", "n_steps"), [(1, 2), (2, 4)])
def test_loop_returns_when_so_many_rows_have_finished(max_finished, n_steps):
    engine = make_engine()
    serve_two(engine)
    (params, kv, pool, batch, plan, choices, _, _), static = arguments(engine)
    batch = dataclasses.replace(batch, remaining=batch.remaining.at[1].set(2))
    *_, batch, trace = decode_loop(
        params, kv, pool, batch, plan, choices, jnp.int32(4), jnp.int32(max_finished), **static
    )
    assert int(trace.n_steps) == n_steps
    assert np.array(batch.active).tolist() == [True, False, False, False]
    assert np.array(trace.rows).tolist() == [2, 2, 1, 1][:n_steps] + [0] * (4 - n_steps)
    assert np.all(np.array(trace.tokens)[2:, 1] == -1)


def test_loop_stops_when_no_row_is_active():
    engine = make_engine()
    serve_two(engine)
    (params, kv, pool, batch, plan, choices, n_steps, quota), static = arguments(engine)
    batch = dataclasses.replace(batch, remaining=jnp.full(4, 1, jnp.int32))
    *_, trace = decode_loop(params, kv, pool, batch, plan, choices, n_steps, quota, **static)
    assert int(trace.n_steps) == 1
    assert not bool(trace.starved)


def test_empty_batch_runs_no_step():
    args, static = arguments(make_engine())
    *_, trace = decode_loop(*args, **static)
    assert int(trace.n_steps) == 0
    assert not bool(trace.starved)


def test_row_of_a_request_round_trips_through_the_batch():
    batch = batches.init(3, 5)
    request = Request("r", [1, 2], 7, stop_tokens=(9,))
    rows = batches.rows_of([(1, request, np.asarray([4, 2]))], n_rows=3, n_pages=5, capacity=2)
    batch = batches.set_rows(batch, *rows)
    assert batch.pages.tolist() == [[0] * 5, [4, 2, 0, 0, 0], [0] * 5]
    assert batch.remaining.tolist() == [0, 7, 0]
    assert batch.stop_tokens[1, :2].tolist() == [9, -1]
