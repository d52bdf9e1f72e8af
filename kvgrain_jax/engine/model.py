"""What the engine needs to know of a model: one step function and the sizes of its KV heads."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvgrain_jax.sharding import TP


@dataclasses.dataclass(frozen=True)
class HiddenAttend:
    """An ``attend`` that is given hidden states too, see ``Model.step``.

    Attributes:
      attend: ``attend(cache, layer, q, k, v, hidden) -> (out, cache)``.
    """

    attend: Callable[..., Any]

    def __call__(self, cache, layer: int, q, k, v, hidden):
        return self.attend(cache, layer, q, k, v, hidden)


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model as the engine sees it. Any JAX function with this signature will do.

    Attributes:
      step: ``step(params, tokens, positions, cache, attend, rows=None) -> (logits, cache)``, pure.
        ``tokens`` and ``positions`` are int32 ``[T]`` (decode: one token of each row; prefill: a
        packed chunk of tokens of several requests). The function calls
        ``out, cache = attend(cache, layer, q, k, v)`` once per layer, ``layer`` a Python int, ``q``
        ``[T, H, D]``, ``k`` and ``v`` ``[T, K, D]`` after position encoding; ``out`` is ``[T, H, D]``
        in the dtype of ``q``. Where ``attend`` has a method ``projected``, a model may call
        ``out, cache = attend.projected(cache, layer, qkv, cos, sin, norms, eps)`` instead, ``qkv``
        ``[T, K, G + 2, D]`` before half-rotation position encoding and, where ``norms`` are gains
        ``[D]`` of queries and keys, RMS norm of each head; the kernel that writes the keys does both. Where it is a ``HiddenAttend``, the model must call
        ``out, cache = attend(cache, layer, q, k, v, hidden)``, ``hidden`` ``[T, d_model]`` being what
        the layer projects to ``q``, ``k`` and ``v``. ``logits`` are float32 ``[T, V]``, or ``[R, V]`` for the tokens
        ``rows`` (int32 ``[R]``) names.
      params: pytree of the weights.
      n_layers: ``L``.
      n_heads: ``H``, query heads.
      n_kv_heads: ``K``.
      head_dim: ``D``.
      vocabulary: number of token ids.
      max_context: longest sequence, prompt and output together, in tokens.
      mesh: devices that run the model together, None for one device. With a mesh, ``step`` is called
        inside ``jax.shard_map`` over it: ``params`` and the heads of ``q``, ``k`` and ``v`` are then
        the rank's part, ``logits`` those of its part of the vocabulary, ``tokens``, ``positions``
        and ``rows`` are whole. The numbers above stay those of all ranks together.
      params_spec: with a mesh, pytree of ``PartitionSpec`` like ``params``.
    """

    step: Callable[..., Any]
    params: Any
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocabulary: int
    max_context: int
    mesh: Mesh | None = None
    params_spec: Any = None

    @property
    def axis(self) -> str | None:
        """Mesh axis of the ranks; None without a mesh."""
        return None if self.mesh is None else TP


def hidden_size(model: Model) -> int:
    """``d_model``: numbers of a token's hidden state, found by tracing the model."""
    sizes: list[int] = []

    def attend(cache, layer, q, k, v, hidden):
        sizes.append(hidden.shape[-1])
        return q, cache

    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    trace = partial(model.step, cache=None, attend=HiddenAttend(attend))
    jax.eval_shape(trace, model.params, token, token)
    return sizes[0]
