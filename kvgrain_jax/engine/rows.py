"""Rows of the batch on the host, and the decode plan of a batch of them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from kvgrain_jax.attention import (
    Choices,
    DecodePlan,
    DispatchRule,
    HotPiece,
    KernelShape,
    Occupancy,
    Segment,
    make_choices,
    make_plan,
    plan_holds,
    segments_that_fit,
)
from kvgrain_jax.engine.metrics import RequestMetrics
from kvgrain_jax.engine.request import Request
from kvgrain_jax.prefix import PrefixCache, Reservation


@dataclasses.dataclass(eq=False)
class Row:
    """A running request.

    Attributes:
      request: what was asked.
      reservation: what it holds of the pools.
      order: place in the order of admission.
      computed: prompt tokens whose KV are there.
      decoding: whether the prompt is complete and the row decodes.
      tokens: generated tokens.
      taken: pages that it took while it decoded.
      first_token: when the first of them was on the host, seconds of the run.
    """

    request: Request
    reservation: Reservation
    order: int
    computed: int
    decoding: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    taken: list[int] = dataclasses.field(default_factory=list)
    first_token: float = 0.0

    @property
    def prompt(self) -> np.ndarray:
        """Token ids of the prompt."""
        return self.reservation.prompt

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` or ``"length"`` if the last token ended the request, else None."""
        if self.tokens and self.tokens[-1] in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_new_tokens else None

    @property
    def kv_tokens(self) -> np.ndarray:
        """Tokens whose KV are written: all but the last generated one, which was never fed."""
        return np.concatenate([self.prompt, np.asarray(self.tokens[:-1], np.int32)])

    @property
    def pages(self) -> np.ndarray:
        """Its page table."""
        return np.concatenate([self.reservation.pages, np.asarray(self.taken, np.int32)])

    def metrics(self, finish: float) -> RequestMetrics:
        """What was measured of the request, which ended ``finish`` seconds into the run."""
        assert self.finish_reason is not None, self.request.id
        return RequestMetrics(
            id=self.request.id,
            arrival=self.request.arrival,
            first_token=self.first_token,
            finish=finish,
            prompt_tokens=self.prompt.size,
            cached_tokens=self.reservation.cached,
            tokens=tuple(self.tokens),
            reason=self.finish_reason,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan:
    """Decode plan of a batch, and what its steps read of shared prefixes.

    Attributes:
      device: the plan that the decode loop takes.
      choices: the backend that a step takes, by its active rows.
      reason: why a step takes the backend it takes, by its active rows.
      read_once: prefix tokens that a step reads once for all rows.
      read_by_row: prefix tokens that each row reads for itself besides, ``[B]``.
      prefix_of_row: tokens of shared prefixes in each row's context, ``[B]``.
    """

    device: DecodePlan
    choices: Choices
    reason: Callable[[int], str]
    read_once: int
    read_by_row: np.ndarray
    prefix_of_row: np.ndarray

    @property
    def n_rows(self) -> int:
        """``B``, rows in front of the batch that it is made for."""
        return len(self.prefix_of_row)

    def prefix_tokens_read(self, backend: str, active: np.ndarray) -> int:
        """Prefix tokens whose KV one step reads, ``active`` (bool ``[B]``) being its rows."""
        if backend == "paged":
            return int(self.prefix_of_row[active].sum())
        return self.read_once + int(self.read_by_row[active].sum())


def sort_key(cache: PrefixCache, row: Row) -> tuple:
    """Rows in the order of this key have those that share a prefix next to each other."""
    return tuple(cache.contiguous_pieces(row.reservation))


def plan_batch(
    rows: Sequence[Row | None],
    cache: PrefixCache,
    *,
    rule: DispatchRule,
    group: int,
    max_segments: int,
    kernels: KernelShape | None = None,
) -> BatchPlan:
    """Plan the decode steps of rows in the order of ``sort_key``.

    Args:
      rows: one for each row of the bucket; None and rows in prefill do not decode.
      cache: where their prefixes lie.
      rule: chooses the backends. Where it has only ``cascade16``, what all rows have in common is
        shared through the pages of row 0; else the contiguous pieces of each prefix class are.
      group: ``G``, query heads of one KV head.
      max_segments: segments of a plan at most. Where there are more, or they nest deeper than the
        plan has room for, the innermost pieces are read through the rows' page tables instead.
      kernels: shape to schedule the GPU kernels for.
    """
    decoding = [row for row in rows if row and row.decoding]
    prefixes = np.zeros(len(rows), np.int64)
    paths = [cache.index.path(row.reservation.node) for row in decoding]
    for i, path in enumerate(paths):
        prefixes[i] = sum(node.length for node in path if node.is_prefix)
    n_slots = cache.geometry.n_slots
    if rule.backends == ("cascade16",):
        common = 0
        for nodes in zip(*paths, strict=False):
            if any(node is not nodes[0] for node in nodes) or len(decoding) < 2:
                break
            common = nodes[0].end
        segments = [Segment(0, common, 0, len(decoding))] if common else []
        n_slots = cache.row_pages * cache.geometry.page_size
    else:
        pieces = [
            [HotPiece(*p) for p in cache.contiguous_pieces(row.reservation)] for row in decoding
        ]
        fits = functools.partial(
            plan_holds, kernels=kernels, n_rows=len(rows), max_segments=max_segments
        )
        segments, _ = segments_that_fit(pieces, fits)
    starts = np.zeros(len(rows), np.int64)
    for segment in segments:
        starts[segment.first_row : segment.first_row + segment.n_rows] += segment.length
    tokens = sum(row.prompt.size + len(row.tokens) for row in decoding) - starts.sum()
    occupancy = Occupancy(len(decoding), group, segments, float(tokens) / max(1, len(decoding)))
    return BatchPlan(
        device=make_plan(
            segments,
            n_rows=len(rows),
            n_slots=n_slots,
            max_segments=max_segments,
            kernels=kernels,
        ),
        choices=make_choices(rule, occupancy, n_rows=len(rows)),
        reason=functools.cache(functools.partial(rule.reason, occupancy)),
        read_once=sum(segment.length for segment in segments),
        read_by_row=np.maximum(prefixes - starts, 0),
        prefix_of_row=prefixes,
    )
