"""Programs of ``tangram_attention``: enter a model and where its heads lie, leave timed loops.

A run of a loop is the decode attention of all layers; a layer's output is the next one's queries, as
the layers of a model wait for each other.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import models
from experiments.kernel_timing import TimedLoop, compile_loop
from experiments.tangram_attention_bench import Method
from experiments.tangram_attention_caches import Cell, Layout
from pallas_kernels import split_kv_decode
from pallas_kernels.head_group_decode import DecodeWork, head_group_decode
from pallas_kernels.implementation import trace_once


def compile_attention(
    model: models.ModelConfig,
    layout: Layout,
    args: tuple[Any, ...],
    method: Method,
    *,
    knobs: Mapping[str, int],
    runs: int,
) -> TimedLoop:
    """Compile the loop.

    Args:
      model: its sizes.
      layout: where its heads lie.
      args: ``q [B, H, D]``, ``k`` and ``v`` ``[rows, D]``, page tables, lengths, and the fields of
        the work list of each layer.
      method: which kernel attends.
      knobs: of the Triton kernel; tuned where empty.
      runs: of the loop; an odd number, so that the loop does not hold the layers many times.
    """
    width, page_size, scale = layout.groups.group_size, layout.page_size, model.head_dim**-0.5

    def step(_, q, k, v, pages, lengths, works):
        k, v = (pool.reshape(-1, width, model.head_dim) for pool in (k, v))
        for layer in range(model.layers):
            options = {"page_size": page_size, "scale": scale, "out_dtype": q.dtype}
            if method.kind == "split_kv":
                q, _ = split_kv_decode(
                    *(q, k, v, pages[:, layer], jnp.zeros(len(q), jnp.int32)),
                    lengths[:, layer, 0],
                    implementation=method.implementation,
                    **options,
                )
            elif knobs and method.implementation in ("auto", "triton"):
                from pallas_kernels.head_group_decode import triton

                args = (q, k, v, pages, lengths, DecodeWork(*works[layer]))
                chosen = tuple(sorted(knobs.items()))
                q, _ = trace_once(triton.decode_work, *args, knobs=chosen, **options)
            else:
                members = layout.members(layer)
                work = DecodeWork(*works[layer])
                q, _ = head_group_decode(
                    *(q, k, v, pages, lengths),
                    members=members,
                    work=work,
                    implementation=method.implementation,
                    **options,
                )
        return q

    return compile_loop(step, args, runs=runs, in_place=True)


def rest_of_step(name: str, config: Mapping[str, Any], cell: Cell) -> float:
    """Milliseconds of a decode step of random weights without its attention.

    The queries take the place of the attention's output; keys and values are added to them, so
    that the compiler does not drop what makes them.
    """
    model = models.load(f"random:{name}", dtype=config["dtype"]).model
    group = model.n_heads // model.n_kv_heads

    def attend(cache, layer, q, k, v):
        return q + jnp.repeat(k + v, group, axis=1), cache

    @jax.jit
    def step(params, tokens, positions):
        logits, _ = model.step(params, tokens, positions, None, attend)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    tokens = jnp.zeros(cell.batch, jnp.int32)
    positions = jnp.full(cell.batch, min(cell.context, model.max_context - 1), jnp.int32)
    program = step.lower(model.params, tokens, positions).compile()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(config["runs"]):
            tokens = program(model.params, tokens, positions)
        jax.block_until_ready(tokens)
        times.append((time.perf_counter() - begin) / config["runs"] * 1e3)
    return statistics.median(times)
