"""The decode batch: one row per request, as arrays of fixed shape, and how rows come and go."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
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
    """A batch of ``n_rows`` empty rows with room for ``n_pages`` pages each."""

    def zeros():  # each field its own buffer: a buffer can be donated only once
        return jnp.zeros(n_rows, jnp.int32)

    return Batch(
        tokens=zeros(),
        lengths=zeros(),
        pages=jnp.zeros((n_rows, n_pages), jnp.int32),
        active=jnp.zeros(n_rows, bool),
        remaining=zeros(),
        n_generated=zeros(),
        stop_tokens=jnp.full((n_rows, MAX_STOP_TOKENS), -1, jnp.int32),
        temperature=jnp.zeros(n_rows, jnp.float32),
        top_k=zeros(),
        top_p=jnp.ones(n_rows, jnp.float32),
        seed=jnp.zeros(n_rows, jnp.uint32),
    )


def check_request(request: Request) -> None:
    """Check that a request fits a row.

    Raises:
      RequestError: more stop tokens than a row holds.
    """
    if len(request.stop_tokens) > MAX_STOP_TOKENS:
        raise RequestError(
            f"Request {request.id} has {len(request.stop_tokens)} stop tokens; a row holds "
            f"{MAX_STOP_TOKENS}."
        )


def row_of(request: Request, pages: np.ndarray, n_pages: int) -> Batch:
    """The row of a checked request that is not yet computed: a batch of one row."""
    table = np.zeros((1, n_pages), np.int32)
    table[0, : len(pages)] = pages
    stop = np.full((1, MAX_STOP_TOKENS), -1, np.int32)
    stop[0, : len(request.stop_tokens)] = request.stop_tokens
    sampling = request.sampling
    return Batch(
        tokens=jnp.zeros(1, jnp.int32),
        lengths=jnp.zeros(1, jnp.int32),
        pages=jnp.asarray(table),
        active=jnp.zeros(1, bool),
        remaining=jnp.asarray([request.max_new_tokens], jnp.int32),
        n_generated=jnp.zeros(1, jnp.int32),
        stop_tokens=jnp.asarray(stop),
        temperature=jnp.asarray([sampling.temperature], jnp.float32),
        top_k=jnp.asarray([sampling.top_k], jnp.int32),
        top_p=jnp.asarray([sampling.top_p], jnp.float32),
        seed=jnp.asarray([sampling.seed], jnp.uint32),
    )


@partial(jax.jit, donate_argnums=0)
def set_row(batch: Batch, index: Int[Array, ""], row: Batch) -> Batch:
    """Put a batch of one row at ``index``."""
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y[0], index, 0), batch, row
    )


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


@jax.jit
def row_pages(batch: Batch, index: Int[Array, ""]) -> Int[Array, "T"]:
    """Page table of the row at ``index``."""
    return batch.pages[index]


def compile_calls(batch: Batch) -> Batch:
    """Compile the calls above by ones that leave the batch as it is."""
    n_rows, n_pages = batch.pages.shape
    row_pages(batch, jnp.int32(0))
    row = jax.tree.map(lambda x: x[:1], batch)
    batch = set_row(batch, jnp.int32(0), row)
    batch = set_pages(batch, jnp.int32(0), np.zeros(n_pages, np.int32), 0)
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
