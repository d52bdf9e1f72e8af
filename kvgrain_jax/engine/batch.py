"""The decode batch: one row per request, as arrays of fixed shape, and how rows come and go."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvgrain_jax.engine.request import Request
from kvgrain_jax.errors import RequestError

MAX_STOP_TOKENS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """State of every row of the batch. ``T`` is the page capacity of a row.

    Attributes:
      tokens: last token of each row, the next to feed.
      lengths: tokens of each row in the KV cache.
      pages: page table of each row's whole context.
      active: rows that decode; the others are empty or still in prefill.
      remaining: tokens each row may still generate.
      n_generated: tokens each row has generated.
      stop_tokens: tokens that end a row; -1 where unused.
      temperature, top_k, top_p, seed: sampling parameters, see ``sampling.sample``.
    """

    tokens: Int[Array, "B"]
    lengths: Int[Array, "B"]
    pages: Int[Array, "B T"]
    active: Bool[Array, "B"]
    remaining: Int[Array, "B"]
    n_generated: Int[Array, "B"]
    stop_tokens: Int[Array, "B stops"]
    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    seed: UInt32[Array, "B"]


def init(n_rows: int, n_pages: int) -> Batch:
    """A batch of ``n_rows`` empty rows with room for ``n_pages`` pages each, on the device."""
    return _on_device(_empty(n_rows, n_pages))


def _empty(n_rows: int, n_pages: int) -> dict[str, np.ndarray]:
    """The fields of empty rows, on the host."""
    return {
        "tokens": np.zeros(n_rows, np.int32),
        "lengths": np.zeros(n_rows, np.int32),
        "pages": np.zeros((n_rows, n_pages), np.int32),
        "active": np.zeros(n_rows, bool),
        "remaining": np.zeros(n_rows, np.int32),
        "n_generated": np.zeros(n_rows, np.int32),
        "stop_tokens": np.full((n_rows, MAX_STOP_TOKENS), -1, np.int32),
        "temperature": np.zeros(n_rows, np.float32),
        "top_k": np.zeros(n_rows, np.int32),
        "top_p": np.ones(n_rows, np.float32),
        "seed": np.zeros(n_rows, np.uint32),
    }


def check_request(
    request: Request, *, n_context: int, vocabulary: int, max_context: int, greedy: bool
) -> None:
    """Check that an engine can serve a request, whatever its pools hold.

    Args:
      request: the request.
      n_context: tokens in front of the first one it generates.
      vocabulary: number of token ids.
      max_context: tokens of one request at most.
      greedy: the engine has no program that draws tokens.

    Raises:
      RequestError: it cannot; the message says why.
    """
    name, largest = f"Request {request.id}", int(np.max(request.prompt))
    if largest >= vocabulary:
        raise RequestError(f"{name}: token id {largest} is outside the vocabulary of {vocabulary}.")
    total = n_context + request.max_new_tokens
    if total > max_context:
        raise RequestError(
            f"{name}: {n_context} tokens of context and {request.max_new_tokens} new ones are "
            f"{total}, more than the context of {max_context}."
        )
    if greedy and request.sampling.temperature > 0:
        raise RequestError(
            f"{name}: temperature is {request.sampling.temperature}, but the engine was made for "
            "greedy requests only; set greedy to False in its configuration."
        )
    if len(request.stop_tokens) > MAX_STOP_TOKENS:
        raise RequestError(
            f"{name} has {len(request.stop_tokens)} stop tokens; a row holds {MAX_STOP_TOKENS}."
        )


def rows_of(
    entries: Sequence[tuple[int, Request, np.ndarray]],
    *,
    n_rows: int,
    n_pages: int,
    capacity: int,
) -> tuple[np.ndarray, Batch]:
    """Rows of checked requests that are not yet computed.

    Args:
      entries: row index, request and page numbers of each, at most ``capacity``.
      n_rows: ``B``, rows of the batch they go to.
      n_pages: ``T``, page capacity of a row.
      capacity: ``R``, rows of the result, so that any number of requests shares one program.

    Returns:
      ``(indices, rows)``: where each row goes, ``B`` for padding, and a batch of ``R`` rows.
    """
    indices = np.full(capacity, n_rows, np.int32)
    rows = _empty(capacity, n_pages)
    for i, (index, request, pages) in enumerate(entries):
        indices[i] = index
        rows["pages"][i, : len(pages)] = pages
        rows["stop_tokens"][i, : len(request.stop_tokens)] = request.stop_tokens
        rows["remaining"][i] = request.max_new_tokens
        for name in ("temperature", "top_k", "top_p", "seed"):
            rows[name][i] = getattr(request.sampling, name)
    return indices, _on_device(rows)


def _on_device(rows: dict[str, np.ndarray]) -> Batch:
    return Batch(**{name: jnp.asarray(field) for name, field in rows.items()})


@partial(jax.jit, donate_argnums=0)
def set_rows(batch: Batch, indices: Int[Array, "R"], rows: Batch) -> Batch:
    """Put rows at ``indices``; ``B`` drops one."""
    return jax.tree.map(lambda x, y: x.at[indices].set(y, mode="drop"), batch, rows)


@partial(jax.jit, donate_argnums=0)
def deactivate(batch: Batch, index: Int[Array, ""]) -> Batch:
    """End the row at ``index``."""
    return dataclasses.replace(batch, active=batch.active.at[index].set(False))


@partial(jax.jit, donate_argnums=0)
def reorder(batch: Batch, order: Int[Array, "B"]) -> Batch:
    """Row ``i`` of the result is row ``order[i]``."""
    return jax.tree.map(lambda x: x[order], batch)


@partial(jax.jit, donate_argnums=0)
def set_pages(
    batch: Batch, index: Int[Array, ""], table: Int[Array, "T"], n: Int[Array, ""]
) -> Batch:
    """Replace the first ``n`` pages of the row at ``index``."""
    place = jnp.arange(table.shape[0], dtype=jnp.int32)
    new = jnp.where(place < n, table, batch.pages[index])
    return dataclasses.replace(batch, pages=batch.pages.at[index].set(new))


def put_first[T](batch: T, rows: T) -> T:
    """A tree of arrays whose first rows are those of another; inside a program."""
    # Not `x.at[:n].set(y)`: its empty index arrays become constants of the program, over which XLA's
    # partitioner crashes on several devices (jaxlib 0.11.2).
    return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, 0, 0), batch, rows)


def compile_calls(batch: Batch, capacities: Iterable[int]) -> Batch:
    """Compile the calls above by ones that leave the batch as it is."""
    n_rows, n_pages = batch.pages.shape
    for capacity in capacities:
        rows = rows_of([], n_rows=n_rows, n_pages=n_pages, capacity=capacity)
        batch = set_rows(batch, *rows)
    batch = set_pages(batch, np.int32(0), np.zeros(n_pages, np.int32), 0)
    return reorder(batch, np.arange(n_rows, dtype=np.int32))


def put_tokens(
    batch: Batch, rows: Int[Array, "R"], tokens: Int[Array, "R"], lengths: Int[Array, "R"]
) -> Batch:
    """Start the rows that prefill completed: their first token is known.

    Args:
      batch: the batch.
      rows: rows, ``B`` or more where the entry is padding.
      tokens: first generated token of each.
      lengths: tokens of each in the KV cache.
    """
    remaining = batch.remaining.at[rows].get(mode="clip") - 1
    stop = batch.stop_tokens.at[rows].get(mode="clip")
    active = (remaining > 0) & ~jnp.any(tokens[:, None] == stop, axis=1)

    def put(x, values):
        return x.at[rows].set(values, mode="drop")

    return dataclasses.replace(
        batch,
        tokens=put(batch.tokens, tokens),
        lengths=put(batch.lengths, lengths),
        active=put(batch.active, active),
        remaining=put(batch.remaining, remaining),
        n_generated=put(batch.n_generated, jnp.ones_like(tokens)),
    )
