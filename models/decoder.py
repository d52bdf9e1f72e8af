"""The Llama-family decoder: RMS norm, rotary grouped-query attention, SwiGLU, read top to bottom.

Tokens with their absolute positions enter, with a cache and the function ``attend`` that owns it;
logits and the cache leave. The decoder never looks into the cache, so prefill, decode and a plain
forward pass are the same code under three ``attend`` functions. Variants (query/key/value bias,
query/key norm, tied embeddings, Llama-3.1 rotary scaling) are fields of ``ModelConfig``.

Matrices are ``[out, in]`` as in checkpoint files, heads folded into one axis, so loading never
transposes and a tensor-parallel shard of heads is a contiguous run of rows. The residual stream has
the dtype of the weights; norms, rotation and logits are computed in float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from kvgrain_jax.engine.model import Model
from models.config import ModelConfig, RopeScaling

# The weights: an ``nnx.State``, which is a pytree of arrays.
Params = Any
Rotation = tuple[Float[Array, "T half"], Float[Array, "T half"]]


class Linear(nnx.Module):
    """``y = W x + b`` with ``W`` ``[out, in]``; random weights of variance ``gain² / in``."""

    def __init__(
        self,
        out_size: int,
        in_size: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        bias: bool = False,
        gain: float = 1.0,
    ) -> None:
        scale = gain / math.sqrt(in_size)
        self.weight = nnx.Param(_normal(rngs.params(), (out_size, in_size), scale, dtype))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        y = jnp.einsum("ti,oi->to", x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, in float32."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        weight = self.weight[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Projections and position encoding around ``attend``, which does the attention itself."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.head_dim = config.head_dim
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        make = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.query = make(q_size, config.d_model, bias=config.qkv_bias)
        self.key = make(kv_size, config.d_model, bias=config.qkv_bias)
        self.value = make(kv_size, config.d_model, bias=config.qkv_bias)
        self.output = make(config.d_model, q_size, gain=_branch_gain(config))
        norm = functools.partial(RMSNorm, config.head_dim, config.eps, dtype=dtype)
        self.query_norm = norm() if config.qk_norm else None
        self.key_norm = norm() if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "T d_model"], rotation: Rotation, cache: Any, attend: Any, layer: int
    ) -> tuple[Float[Array, "T d_model"], Any]:
        tokens = x.shape[0]
        q = self.query(x).reshape(tokens, -1, self.head_dim)
        k = self.key(x).reshape(tokens, -1, self.head_dim)
        v = self.value(x).reshape(tokens, -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        out, cache = attend(cache, layer, rotate(q, rotation), rotate(k, rotation), v)
        return self.output(out.reshape(tokens, -1)), cache


class FeedForward(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        make = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.gate = make(config.ffn, config.d_model)
        self.up = make(config.ffn, config.d_model)
        self.down = make(config.d_model, config.ffn, gain=_branch_gain(config))

    def __call__(self, x: Float[Array, "T d_model"]) -> Float[Array, "T d_model"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream after."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.d_model, config.eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.ffn_norm = RMSNorm(config.d_model, config.eps, dtype=dtype)
        self.ffn = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T d_model"], rotation: Rotation, cache: Any, attend: Any, layer: int
    ) -> tuple[Float[Array, "T d_model"], Any]:
        out, cache = self.attention(self.attention_norm(x), rotation, cache, attend, layer)
        x = x + out
        return x + self.ffn(self.ffn_norm(x)), cache


class Decoder(nnx.Module):
    """The whole model. Built with random weights; ``decoder_step`` runs it on any weights."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        size = (config.vocabulary, config.d_model)
        # The final norm gives features of unit mean square: rows of this scale make logits of
        # variance about one, tied or not.
        scale = 1.0 / math.sqrt(config.d_model)
        self.embedding = nnx.Param(_normal(rngs.params(), size, scale, dtype))
        self.layers = nnx.List(
            [Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)]
        )
        self.final_norm = RMSNorm(config.d_model, config.eps, dtype=dtype)
        untied = not config.tied_embeddings
        self.head = nnx.Param(_normal(rngs.params(), size, scale, dtype)) if untied else None

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        cache: Any,
        attend: Callable[..., Any],
        rows: Int[Array, " R"] | None = None,
    ) -> tuple[Float[Array, "rows vocabulary"], Any]:
        x = self.embedding[...].at[tokens].get(mode="clip")
        frequencies = rope_frequencies(
            self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
        )
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
        # The barrier keeps one table a step: fused, XLA would take sines again in every layer.
        rotation = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, rotation, cache, attend, index)
        if rows is not None:
            # Before the head: it is the widest matmul, and prefill wants one row of a chunk.
            x = x.at[rows].get(mode="clip")
        head = self.embedding if self.head is None else self.head
        logits = jnp.einsum(
            "td,vd->tv", self.final_norm(x), head[...], preferred_element_type=jnp.float32
        )
        return logits, cache


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Rotary angle per position of each pair of features.

    Returns:
      float32 ``[D // 2]``: ``theta ** (-2 i / D)``, stretched as Llama 3.1 does if ``scaling`` is
      given (source: the reference code of Llama 3.1, ``apply_scaling``).
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_context * frequencies / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / scaling.factor)
    return frequencies.astype(np.float32)


def rotate(x: Float[Array, "T heads D"], rotation: Rotation) -> Float[Array, "T heads D"]:
    """Rotates each pair ``(x[i], x[i + D/2])`` by its angle, in float32 (half-rotation RoPE)."""
    cos, sin = rotation[0][:, None, :], rotation[1][:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def plain_attend(
    cache: Any,
    layer: int,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
) -> tuple[Float[Array, "T H D"], Any]:
    """Causal attention of one sequence, its tokens in order, without a cache.

    Scores and softmax are float32 and ``[H, T, T]`` large: for checks and short inputs.

    Returns:
      ``out``, in the dtype of ``q``, and ``cache`` as it came.
    """
    del layer
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], heads // k.shape[1], head_dim)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores / math.sqrt(head_dim), -jnp.inf), axis=-1)
    out = jnp.einsum(
        "kgts,skd->tkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.reshape(tokens, heads, head_dim).astype(q.dtype), cache


def abstract_params(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Shapes and dtypes of the weights, as the pytree ``decoder_step`` wants, without the weights."""
    shapes = nnx.split(_abstract_decoder(config))[1]
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


def random_params(config: ModelConfig, dtype: DTypeLike, seed: int = 0) -> Params:
    """Random weights that keep activations and logits near unit variance.

    Each tensor is drawn by its own jitted program on the default device: no float32 copy of the
    model is ever held. The same seed gives the same weights.
    """
    return nnx.split(Decoder(config, dtype=dtype, rngs=nnx.Rngs(seed)))[1]


@functools.cache
def decoder_step(config: ModelConfig) -> Callable[..., Any]:
    """Returns the step function of ``kvgrain_jax.engine.model.Model`` for this config.

    ``step(params, tokens, positions, cache, attend, rows=None) -> (logits, cache)`` with ``params``
    shaped like ``abstract_params(config)``. Equal configs share one function, so programs
    compiled with it are found again. Ids in ``tokens`` and ``rows`` are clipped into range, as
    nothing can be raised under ``jit``: whoever takes them from outside checks them.
    """
    graph, _ = nnx.split(_abstract_decoder(config))

    def step(
        params: Params,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        cache: Any,
        attend: Callable[..., Any],
        rows: Int[Array, " R"] | None = None,
    ) -> tuple[Float[Array, "rows vocabulary"], Any]:
        return nnx.merge(graph, params)(tokens, positions, cache, attend, rows)

    return step


def as_model(config: ModelConfig, params: Params) -> Model:
    """Joins a config and its weights to the model that the engine runs."""
    return Model(
        step=decoder_step(config),
        params=params,
        n_layers=config.layers,
        n_heads=config.heads,
        n_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocabulary,
        max_context=config.max_context,
    )


@functools.cache
def _abstract_decoder(config: ModelConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def _branch_gain(config: ModelConfig) -> float:
    # 2 L branches add into the residual stream.
    return 1.0 / math.sqrt(2 * config.layers)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _normal(key: Any, shape: tuple[int, ...], scale: float | Array, dtype: DTypeLike) -> Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
