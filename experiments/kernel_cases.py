"""Work that the kernel benchmark measures: enters shapes of real models, leaves timeable cases.

``arg_specs`` are head shapes of models (a rank of a tensor-parallel group where named). A case
knows its arrays, the step of each implementation, its floating-point operations, the fewest bytes
it can move, and what it is held against.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from experiments.kernel_timing import normal
from pallas_kernels.segment_attention import Schedule, build_schedule, tiles_for
from pallas_kernels.split_kv_decode import longest_first


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Heads of one layer on one device: ``K`` KV heads, ``G`` query heads each, head dim ``D``."""

    n_kv_heads: int
    group: int
    head_dim: int

    def queries(self, n_rows: int, dtype: Any) -> jax.Array:
        return normal(1, (n_rows, self.n_kv_heads * self.group, self.head_dim), dtype)

    def pools(self, n_slots: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
        shape = (n_slots, self.n_kv_heads, self.head_dim)
        return normal(2, shape, dtype), normal(3, shape, dtype)

    def flops(self, pairs: int) -> int:
        """Of ``pairs`` (row, key) pairs: QKᵀ and PV, all heads."""
        return 4 * pairs * self.n_kv_heads * self.group * self.head_dim

    def kv_bytes(self, n_keys: int, dtype: Any) -> int:
        return 2 * n_keys * self.n_kv_heads * self.head_dim * jnp.dtype(dtype).itemsize


ARG_SPECS = {
    "llama-3.1-8b": HeadShape(8, 4, 128),
    "qwen2.5-14b": HeadShape(8, 5, 128),
    "qwen2.5-14b/tp2": HeadShape(4, 5, 128),
    "qwen2.5-32b/tp4": HeadShape(2, 5, 128),
    "qwen3-4b": HeadShape(8, 4, 128),
    "smollm2-135m": HeadShape(3, 3, 64),
}
LLAMA, QWEN_RANK = ARG_SPECS["llama-3.1-8b"], ARG_SPECS["qwen2.5-32b/tp4"]

type Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of work.

    Attributes:
      name: what it is.
      args: its arrays.
      steps: for each implementation the step over ``args``.
      flops: floating-point operations.
      n_bytes: fewest bytes.
      bar: what to reach: ``("matmul", fraction)``, ``("us", microseconds)``, or the name of a case
        measured before and the multiple of its time; None without one.
      peers: microseconds of other systems on the same work, on an H200.
      in_place: a step's output is the first of the next one's arrays.
      n_turns: sets of inputs that take turns.
    """

    name: str
    args: Sequence[Any]
    steps: Mapping[str, Step]
    flops: int
    n_bytes: int
    bar: tuple[str, float] | None = None
    peers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_place: bool = False
    n_turns: int = 1


def prefix_case(
    name: str,
    shape: HeadShape,
    classes: Sequence[tuple[int, int]],
    *,
    rotate: int = 1,
    tiles: tuple[int, int] | None = None,
    implementations: Sequence[str] = ("mosaic",),
    merged: bool = True,
    dtype: Any = jnp.bfloat16,
    **more: Any,
) -> Case:
    """Segment attention of ``classes``: (rows, prefix tokens) of each.

    ``rotate`` sets of slabs take turns, so that a run does not find its keys in the cache. Without
    ``merged`` the kernels leave their partials.
    """
    attend = pallas_kernels.segment_attention if merged else pallas_kernels.segment_partials
    span = sum(-(-length // 128) * 128 for _, length in classes)
    segments, base, row = [], 0, 0
    for rows, length in classes:
        segments.append((base, length, row, rows))
        base, row = base + -(-length // 128) * 128, row + rows
    q = shape.queries(row, dtype)
    k, v = shape.pools(span * rotate, dtype)
    plans = [
        plan(
            [(base + turn * span, *rest) for base, *rest in segments],
            shape,
            row,
            span * rotate,
            tiles,
        )
        for turn in range(rotate)
    ]

    def step(implementation: str) -> Step:
        def run(turn, q, k, v, plans):
            schedule, table, work = plans[turn % rotate]
            return attend(
                q,
                k,
                v,
                table,
                work,
                jnp.int32(work.shape[0]),
                row_tile=XLA_TILE[0],
                kv_tile=XLA_TILE[1],
                scale=shape.head_dim**-0.5,
                schedule=schedule,
                implementation=implementation,
            )

        return run

    keys = sum(length for _, length in classes)
    pairs = sum(rows * length for rows, length in classes)
    return Case(
        name,
        (q, k, v, plans),
        {implementation: step(implementation) for implementation in implementations},
        shape.flops(pairs),
        shape.kv_bytes(keys, dtype),
        n_turns=rotate,
        **more,
    )


XLA_TILE = (64, 512)


def plan(
    segments: Sequence[tuple[int, int, int, int]],
    shape: HeadShape,
    n_rows: int,
    n_slots: int,
    tiles: tuple[int, int] | None = None,
) -> tuple[Schedule, jax.Array, jax.Array]:
    """Schedule, segments and XLA work list, on the device."""
    row_tile, kv_tile = tiles or tiles_for(
        folded_rows=max(rows for *_, rows in segments) * shape.group,
        length=max(length for _, length, _, _ in segments),
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
    )
    schedule = build_schedule(
        np.array(segments, np.int32),
        n_rows=n_rows,
        n_slots=n_slots,
        n_kv_heads=shape.n_kv_heads,
        group=shape.group,
        row_tile=row_tile,
        kv_tile=kv_tile,
        n_workers=multiprocessors(),
    )
    work = [
        (i, row, kv)
        for i, (_, length, _, rows) in enumerate(segments)
        for row in range(0, rows, XLA_TILE[0])
        for kv in range(0, length, XLA_TILE[1])
    ]
    return (
        jax.tree.map(jnp.asarray, schedule),
        jnp.asarray(segments, jnp.int32),
        jnp.asarray(work, jnp.int32),
    )


def multiprocessors() -> int:
    """Multiprocessors of the default GPU; 8 elsewhere, where kernels are only interpreted."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else 8


def suffix_case(
    name: str,
    shape: HeadShape,
    lengths: np.ndarray,
    *,
    page_size: int = 1,
    implementations: Sequence[str] = ("triton",),
    knobs: Mapping[str, int] | None = None,
    splits: tuple[int, ...] | None = None,
    ordered: bool = False,
    dtype: Any = jnp.bfloat16,
    **more: Any,
) -> Case:
    """Split-KV decode of rows of ``lengths`` tokens in random pages.

    ``knobs`` times the Triton kernel itself with these, as implementation ``triton``. ``ordered``
    starts the longest rows first; their order, found once a decode step, is not part of the time.
    """
    rng, n_rows = np.random.default_rng(0), len(lengths)
    needed = -(-lengths // page_size)
    n_pages = int(needed.sum()) + 1
    order = rng.permutation(n_pages)
    pages = np.zeros((n_rows, int(needed.max())), np.int32)
    for row, (first, n) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        pages[row, :n] = order[first : first + n]
    q = shape.queries(n_rows, dtype)
    k, v = shape.pools(n_pages * page_size, dtype)

    starts, ends = jnp.zeros(n_rows, jnp.int32), jnp.asarray(lengths, jnp.int32)
    order = longest_first(starts, ends) if ordered else None

    def step(implementation: str) -> Step:
        def run(_, q, k, v, pages, starts, lengths, order, prefix=None, out_dtype=jnp.float32):
            options = {"page_size": page_size, "scale": shape.head_dim**-0.5, "splits": splits}
            options |= {"order": order, "prefix": prefix, "out_dtype": out_dtype}
            if knobs is not None:
                from pallas_kernels.split_kv_decode import triton

                return triton.split_kv_decode(
                    q, k, v, pages, starts, lengths, knobs=knobs, **options
                )
            return pallas_kernels.split_kv_decode(
                q, k, v, pages, starts, lengths, implementation=implementation, **options
            )

        return run

    return Case(
        name,
        (q, k, v, jnp.asarray(pages), starts, ends, order),
        {implementation: step(implementation) for implementation in implementations},
        shape.flops(int(lengths.sum())),
        shape.kv_bytes(int(lengths.sum()), dtype),
        **more,
    )


def whole_case(
    name: str,
    shape: HeadShape,
    n_rows: int,
    prefix: int,
    suffix: int,
    *,
    prefix_kernel: str = "mosaic",
    **more: Any,
) -> Case:
    """One layer's decode attention, page size 1: the suffix kernel merges the prefix's partials."""
    prefix_part = prefix_case(
        "", shape, [(n_rows, prefix)], implementations=(prefix_kernel,), merged=False
    )
    suffix_part = suffix_case("", shape, np.full(n_rows, suffix))
    first, second = prefix_part.steps[prefix_kernel], suffix_part.steps["triton"]
    n_prefix = len(prefix_part.args)

    def run(i, q, *args):
        partials = first(i, q, *args[: n_prefix - 1])
        return second(i, q, *args[n_prefix - 1 :], prefix=partials, out_dtype=q.dtype)

    return Case(
        name,
        (*prefix_part.args, *suffix_part.args[1:]),
        {f"{prefix_kernel}+triton": run},
        prefix_part.flops + suffix_part.flops,
        prefix_part.n_bytes + suffix_part.n_bytes,
        **more,
    )


def append_case(name: str, shape: HeadShape, n_rows: int, n_slots: int, **more: Any) -> Case:
    """KV append of one token a row, in place, into a pool of ``n_slots`` slots."""
    dtype = jnp.bfloat16
    k, v = shape.pools(n_slots, dtype)
    new_k, new_v = shape.pools(n_rows, dtype)
    slots = jnp.asarray(np.random.default_rng(0).permutation(n_slots)[:n_rows], jnp.int32)

    def step(implementation: str) -> Step:
        def run(_, pools, new_k, new_v, slots):
            k, v = pools
            return pallas_kernels.append_kv(
                k, v, new_k, new_v, slots, implementation=implementation
            )

        return run

    return Case(
        name,
        ((k, v), new_k, new_v, slots),
        {implementation: step(implementation) for implementation in ("triton", "xla")},
        0,
        2 * shape.kv_bytes(n_rows, dtype),
        in_place=True,
        **more,
    )
