"""Sampling: enters logits and each row's parameters, leaves one token a row. Runs on the device."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32


def greedy_sample(logits: Float[Array, "B V"], *_: Array) -> Int[Array, "B"]:
    """The most likely token of every row; of equal logits the lowest token id wins."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float[Array, "B V"],
    temperature: Float[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    seed: UInt32[Array, "B"],
    n_generated: Int[Array, "B"],
) -> Int[Array, "B"]:
    """Draw the next token of every row.

    A row's draw depends on its own seed and on how many tokens it has, not on the rest of the
    batch, so a request gives the same tokens in any company. Of equal logits the lowest token id
    wins.

    Args:
      logits: float32.
      temperature: 0 for greedy.
      top_k: 0 keeps all tokens.
      top_p: in (0, 1]; the most likely tokens that together reach it are kept.
      seed: seed of each request.
      n_generated: tokens each request has generated so far.
    """
    greedy = greedy_sample(logits)

    def draw():
        drawn = jax.vmap(_draw_row)(logits, temperature, top_k, top_p, seed, n_generated)
        return jnp.where(temperature > 0, drawn, greedy)

    return lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _draw_row(logits, temperature, top_k, top_p, seed, n_generated):
    order = jnp.argsort(-logits, stable=True)
    scaled = logits[order] / jnp.where(temperature > 0, temperature, 1.0)
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    scaled = jnp.where((top_k == 0) | (rank < top_k), scaled, -jnp.inf)
    probability = jax.nn.softmax(scaled)
    before = jnp.cumsum(probability) - probability
    scaled = jnp.where((before < top_p) | (rank == 0), scaled, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(seed), n_generated)
    return order[jax.random.categorical(key, scaled)].astype(jnp.int32)
