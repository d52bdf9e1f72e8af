"""The Llama-family decoder: RMS norm, rotary grouped-query attention, SwiGLU, read top to bottom.

Tokens with their absolute positions enter, with a cache and the function ``attend`` that owns it;
logits and the cache leave. The decoder never looks into the cache, so prefill, decode and a plain
forward pass are the same code under three ``attend`` functions. Variants (query/key/value bias,
query/key norm, tied embeddings, Llama-3.1 rotary scaling) are fields of ``ModelConfig``.

Weights that read the same input are one weight and one matmul: query, key and value, with the heads
of a KV head side by side, and gate and up. The input features are the last axis, as in checkpoint
files. The residual stream has the dtype of the weights; norms, rotation and logits are computed in
float32.

Given the name of a mesh axis, the decoder runs inside ``shard_map``: the weights that arrive are the
rank's own part (see ``tensor_parallel``), and what ranks compute in parts is summed over the axis.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from kvgrain_jax import sharding
from kvgrain_jax.engine.model import HiddenAttend, Model
from models.config import ModelConfig, RopeScaling
from models.tensor_parallel import parallel_config, params_spec
from pallas_kernels import add_rms_norm
from pallas_kernels.add_rms_norm import rms_norm
from pallas_kernels.rope_append import rotate

# Weights by name, e.g. ``layers.3.attention.qkv.weight``.
Params = dict[str, Any]
Rotation = tuple[Float[Array, "T half"], Float[Array, "T half"]]
# The residual stream and what the last branch adds to it; the sum is taken where it is normalised.
Stream = tuple[Float[Array, "T d_model"], Float[Array, "T d_model"] | None]


class Linear(nnx.Module):
    """``y = W x + b`` with ``W`` ``[*out, in]``."""

    def __init__(self, out_shape: tuple[int, ...], in_size: int, *, bias: bool = False) -> None:
        self.weight = _weight(*out_shape, in_size)
        self.bias = _weight(*out_shape) if bias else None

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T *out"]:
        y = jnp.tensordot(x, self.weight[...], axes=(-1, -1))
        return y if self.bias is None else y + self.bias[...][None]


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = _weight(size)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return rms_norm(x, self.weight[...], eps=self.eps)

    def of_sum(self, stream: Stream) -> tuple[Float[Array, "T d_model"], Float[Array, "T d_model"]]:
        """Returns the sum of the stream and its norm."""
        x, delta = stream
        if delta is None:
            return x, self(x)
        return add_rms_norm(x, delta, self.weight[...], eps=self.eps)


class Attention(nnx.Module):
    """Projections and position encoding around ``attend``, which does the attention itself.

    ``qkv`` is ``[K, G + 2, D, d_model]``: for each KV head its G query heads, its key, its value.
    """

    def __init__(self, config: ModelConfig, axis: str | None) -> None:
        self.axis = axis
        heads = (config.kv_heads, config.heads // config.kv_heads + 2, config.head_dim)
        self.qkv = Linear(heads, config.d_model, bias=config.qkv_bias)
        self.output = Linear((config.d_model,), config.heads * config.head_dim)
        self.eps = config.eps
        norm = functools.partial(RMSNorm, config.head_dim, config.eps)
        self.query_norm = norm() if config.qk_norm else None
        self.key_norm = norm() if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "T d_model"], rotation: Rotation, cache: Any, attend: Any, layer: int
    ) -> tuple[Float[Array, "T d_model"], Any]:
        tokens = x.shape[0]
        qkv = self.qkv(x)
        if hasattr(attend, "projected"):
            out, cache = attend.projected(cache, layer, qkv, *rotation, self._norms(), self.eps)
        else:
            q = qkv[:, :, :-2].reshape(tokens, -1, qkv.shape[-1])
            k, v = qkv[:, :, -2], qkv[:, :, -1]
            if self.query_norm is not None and self.key_norm is not None:
                q, k = self.query_norm(q), self.key_norm(k)
            seen = (x,) if isinstance(attend, HiddenAttend) else ()
            out, cache = attend(cache, layer, rotate(q, *rotation), rotate(k, *rotation), v, *seen)
        return _sum_ranks(self.output(out.reshape(tokens, -1)), self.axis), cache

    def _norms(self) -> tuple[jax.Array, jax.Array] | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        return self.query_norm.weight[...], self.key_norm.weight[...]


class FeedForward(nnx.Module):
    """SwiGLU: ``down(silu(gate) * up)``; ``gate_up`` is ``[2, ffn, d_model]``."""

    def __init__(self, config: ModelConfig, axis: str | None) -> None:
        self.axis = axis
        self.gate_up = Linear((2, config.ffn), config.d_model)
        self.down = Linear((config.d_model,), config.ffn)

    def __call__(self, x: Float[Array, "T d_model"]) -> Float[Array, "T d_model"]:
        gate_up = self.gate_up(x)
        return _sum_ranks(self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]), self.axis)


class Layer(nnx.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream after."""

    def __init__(self, config: ModelConfig, axis: str | None) -> None:
        self.attention_norm = RMSNorm(config.d_model, config.eps)
        self.attention = Attention(config, axis)
        self.ffn_norm = RMSNorm(config.d_model, config.eps)
        self.ffn = FeedForward(config, axis)

    def __call__(
        self, x: Stream, rotation: Rotation, cache: Any, attend: Any, layer: int
    ) -> tuple[Stream, Any]:
        y, norm = self.attention_norm.of_sum(x)
        out, cache = self.attention(norm, rotation, cache, attend, layer)
        y, norm = self.ffn_norm.of_sum((y, out))
        return (y, self.ffn(norm)), cache


class Decoder(nnx.Module):
    """The whole model, its weights declared by shape; ``decoder_step`` runs it on real ones."""

    def __init__(self, config: ModelConfig, axis: str | None = None) -> None:
        self.config = config
        self.axis = axis
        self.embedding = _weight(config.vocabulary, config.d_model)
        self.layers = nnx.List([Layer(config, axis) for _ in range(config.layers)])
        self.final_norm = RMSNorm(config.d_model, config.eps)
        tied = config.tied_embeddings
        self.head = None if tied else _weight(config.vocabulary, config.d_model)

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        cache: Any,
        attend: Callable[..., Any],
        rows: Int[Array, " R"] | None = None,
    ) -> tuple[Float[Array, "rows vocabulary"], Any]:
        x = embed(self.embedding[...], tokens, self.axis)
        frequencies = rope_frequencies(
            self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
        )
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
        # The barrier keeps one table a step: fused, XLA would take sines again in every layer.
        rotation = lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
        stream: Stream = (x, None)
        for index, layer in enumerate(self.layers):
            stream, cache = layer(stream, rotation, cache, attend, index)
        if rows is not None:
            # Before the head: it is the widest matmul, and prefill wants one row of a chunk.
            stream = jax.tree.map(lambda part: part.at[rows].get(mode="clip"), stream)
        head = self.embedding if self.head is None else self.head
        logits = jnp.einsum(
            "td,vd->tv",
            self.final_norm.of_sum(stream)[1],
            head[...],
            preferred_element_type=jnp.float32,
        )
        return logits, cache


def embed(
    table: Float[Array, "vocabulary d_model"], tokens: Int[Array, " T"], axis: str | None
) -> Float[Array, "T d_model"]:
    """Looks tokens up, each on the rank of ``axis`` whose rows hold it. Ids are clipped into range."""
    if axis is None:
        return table.at[tokens].get(mode="clip")
    own_rows = table.shape[0]
    tokens = jnp.clip(tokens, 0, lax.axis_size(axis) * own_rows - 1)
    row = tokens - lax.axis_index(axis) * own_rows
    found = table.at[row].get(mode="clip")
    is_own = (row >= 0) & (row < own_rows)
    return _sum_ranks(jnp.where(is_own[:, None], found, jnp.zeros_like(found)), axis)


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
    """Shapes and dtypes of the weights that ``decoder_step`` wants, without the weights."""
    leaves = jax.tree_util.tree_leaves_with_path(_declared(config, None)[1])
    # A leaf's path ends in the attribute of the Param that holds it.
    named = {".".join(str(key.key) for key in path[:-1]): leaf for path, leaf in leaves}
    return {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in named.items()}


def bind(config: ModelConfig, params: Params, axis: str | None = None) -> Decoder:
    """Returns the module with its weights in place of their shapes, to call or to look into."""
    graph, declared = _declared(config, axis)
    weights = [params[name] for name in abstract_params(config)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(declared), weights))


@functools.cache
def decoder_step(config: ModelConfig, axis: str | None = None) -> Callable[..., Any]:
    """Returns the step function of ``kvgrain_jax.engine.model.Model`` for this config.

    ``step(params, tokens, positions, cache, attend, rows=None) -> (logits, cache)`` with ``params``
    shaped like ``abstract_params(config)``. Equal configs share one function, so programs
    compiled with it are found again. Ids in ``tokens`` and ``rows`` are clipped into range, as
    nothing can be raised under ``jit``: whoever takes them from outside checks them.

    Args:
      config: the model.
      axis: mesh axis of tensor parallelism. ``step`` must then be called inside ``shard_map``, with
        weights cut as ``params_spec`` says; ``attend`` is given the rank's heads, and the logits
        are those of the rank's part of the vocabulary.
    """

    def step(
        params: Params,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        cache: Any,
        attend: Callable[..., Any],
        rows: Int[Array, " R"] | None = None,
    ) -> tuple[Float[Array, "rows vocabulary"], Any]:
        return bind(config, params, axis)(tokens, positions, cache, attend, rows)

    return step


def as_model(config: ModelConfig, params: Params, mesh: jax.sharding.Mesh | None = None) -> Model:
    """Joins a config and its weights to the model that the engine runs.

    Args:
      config: the model.
      params: its weights; with a mesh those of ``parallel_config(config, mesh)``, placed on it.
      mesh: devices that run it together, from ``kvgrain_jax.sharding.make_mesh``.

    Raises:
      ConfigError: the model cannot be cut for the mesh.
    """
    config = parallel_config(config, mesh)
    return Model(
        step=decoder_step(config, None if mesh is None else sharding.TP),
        params=params,
        n_layers=config.layers,
        n_heads=config.heads,
        n_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocabulary,
        max_context=config.max_context,
        mesh=mesh,
        params_spec=None if mesh is None else params_spec(params),
    )


@functools.cache
def _declared(config: ModelConfig, axis: str | None) -> Any:
    return nnx.split(Decoder(config, axis))


def _weight(*shape: int) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))


def _sum_ranks(x: Array, axis: str | None) -> Array:
    return x if axis is None else lax.psum(x, axis)
