"""Both axes at once: enters a cell and a bench, leaves bytes and step time of rows that share a prefix.

The same requests run on GraniKV alone (the prefix once, whole), on Tangram alone (each request its own
prefix, compressed) and on both (the prefix once, compressed).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.tangram_systems import Bench
from experiments.workloads import Target, prepare
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.budgets.shared import slab_layout
from kvgrain_jax.engine import Engine, Request
from kvgrain_jax.errors import ConfigError


def measure_axes(cell: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """Prefills the requests of a cell and times decode steps of all of them.

    Args:
      cell: ``system``, ``evicted``, ``group_size``; ``requests``, a workload of
        ``experiments.workloads`` whose requests arrive together and end together; ``loops``, calls
        of the decode loop that are timed.
      bench: model and budgets.

    Returns:
      ``kv_mib``, keys and values when all begin to decode; ``step_ms``, median; ``prefill_s``, from the
      first request to the last first token; ``tokens_s`` of the steps; ``warmup_s``; ``answers``.
    """
    model = bench.loaded.model
    target = Target(model.vocabulary, bench.fields["max_context"], bench.loaded.tokenizer)
    requests = prepare(cell["requests"])(target).requests
    engine = _make_engine(cell, bench, requests)
    begin = time.perf_counter()
    if isinstance(engine, Engine):
        engine.warmup()
    else:
        shared = requests[0].shared_tokens
        engine.run([Request("warm", requests[0].prompt, 4, shared_tokens=shared)])
        for prefix in list(engine.prefixes.prefixes.values()):
            engine.prefixes.drop(prefix)
    warmup_s = time.perf_counter() - begin
    return _run(engine, requests, cell["loops"], bench) | {"warmup_s": warmup_s}


def _run(
    engine: Engine | HeadEngine, requests: Sequence[Request], loops: int, bench: Bench
) -> dict[str, Any]:
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    begin = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while not all(answers.values()):
        # Rows that are ready wait for the others, so that all decode together afterwards.
        for event in engine.prefill():
            answers[event.id].extend(event.tokens)
    prefill_s = time.perf_counter() - begin
    kv_bytes = _kv_bytes(engine, bench)
    for event in engine.step():  # what the last prefill had launched is done
        answers[event.id].extend(event.tokens)
    steps = []
    for _ in range(loops):
        begin = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - begin
        if len(events) < len(requests):
            raise ConfigError(
                f"After {len(steps)} calls of the decode loop some requests have ended; lower "
                f"config.workload.loops, {loops}, or raise the output tokens."
            )
        steps.append(seconds / max(len(event.tokens) for event in events))
        for event in events:
            answers[event.id].extend(event.tokens)
    while engine.has_work:
        for event in engine.step():
            answers[event.id].extend(event.tokens)
    step = float(np.median(steps))
    return {
        "kv_mib": kv_bytes / 2**20,
        "step_ms": 1000 * step,
        "prefill_s": prefill_s,
        "tokens_s": len(requests) / step,
        "answers": answers,
    }


def _kv_bytes(engine: Engine | HeadEngine, bench: Bench) -> int:
    """Bytes of keys and values that requests and prefixes hold."""
    if isinstance(engine, Engine):
        ledger = engine.cache.ledger
        return (ledger.hot_tokens + ledger.cold_tokens) * bench.token_bytes
    geometry = engine.ledger.geometry
    row = geometry.page_bytes // (geometry.page_size * geometry.group_size)
    return engine.ledger.allocated_bytes + engine.ledger.slab_rows * row


def _make_engine(
    cell: Mapping[str, Any], bench: Bench, requests: Sequence[Request]
) -> Engine | HeadEngine:
    """An engine with room for all requests and their prefixes."""
    prompts = {np.asarray(r.prompt)[: r.shared_tokens].tobytes(): r for r in requests}
    prefixes = [request.shared_tokens for request in prompts.values()]
    own = [len(r.prompt) - r.shared_tokens + r.max_new_tokens for r in requests]
    page = bench.fields["page_size"]
    if cell["system"] == "granikv":
        hot = sum(-(-n // 64) * 64 for n in prefixes) + 64
        # Pieces of prefixes lie in COLD until they are known to be shared.
        cold = sum(n + page for n in own) + sum(prefixes) + max(prefixes)
        total = -(-(hot + cold) // 64) * 64
        return bench.granikv_engine(
            pool_tokens=total, hot_tokens=hot, max_batch=bench.fields["max_batch"]
        )
    plan = bench.plan(cell["evicted"])
    vector = bench.token_bytes // plan.demands.size
    align = bench.fields["slab_align"]
    slabs = sum(slab_layout(plan.budgets(n), align)[1] + align for n in prefixes) * vector
    groups = bench.groups(cell["group_size"], False)
    whole = sum(bench.whole_bytes(n + page) for n in own)
    if cell["system"] == "shared":
        # A prefix is computed in pages before it moves to its slab.
        prefix = max(groups.by_group(plan.budgets(n)).max(axis=1).sum() for n in prefixes)
        rest = whole + int(prefix + page * groups.n_groups) * groups.group_size * vector
        row = page * groups.group_size * vector
        slabs = -(-slabs // row) * row
        fields = {"pool_bytes": slabs + rest + 2 * row, "hot_bytes": slabs + row}
    else:
        each = [groups.by_group(plan.budgets(len(r.prompt))).max(axis=1) for r in requests]
        tokens = sum(int(n.sum()) + page * groups.n_groups for n in each)
        fields = {"pool_bytes": tokens * groups.group_size * vector + whole}
    return bench.head_engine(
        cell["system"], evicted=cell["evicted"], group_size=cell["group_size"], **fields
    )
