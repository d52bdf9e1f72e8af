"""From a file's named tensors to the decoder's weights, with every name and shape checked.

What a checkpoint claims to hold enters (names and shapes) and is compared with what the config
needs; then arrays enter and the weights of ``decoder_step`` leave: tensors that the decoder reads
together are joined, and each weight is placed before the next is fetched. The tables of names are
those of Hugging Face transformers and of llama.cpp's GGUF; in both, matrices are ``[out, in]``.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import DTypeLike

from kvgrain_jax import sharding
from models.config import ModelConfig
from models.decoder import Params, abstract_params
from models.errors import CheckpointError
from models.tensor_parallel import kind, parallel_config, placement, replicate_kv_heads

# Name here, in Hugging Face transformers, in GGUF; {} is the layer.
_NAMES = (
    ("embedding", "model.embed_tokens.weight", "token_embd.weight"),
    ("final_norm.weight", "model.norm.weight", "output_norm.weight"),
    ("head", "lm_head.weight", "output.weight"),
    *(
        (f"layers.{{}}.{ours}", f"model.layers.{{}}.{huggingface}", f"blk.{{}}.{gguf}")
        for ours, huggingface, gguf in (
            ("attention_norm.weight", "input_layernorm.weight", "attn_norm.weight"),
            ("attention.query.weight", "self_attn.q_proj.weight", "attn_q.weight"),
            ("attention.query.bias", "self_attn.q_proj.bias", "attn_q.bias"),
            ("attention.key.weight", "self_attn.k_proj.weight", "attn_k.weight"),
            ("attention.key.bias", "self_attn.k_proj.bias", "attn_k.bias"),
            ("attention.value.weight", "self_attn.v_proj.weight", "attn_v.weight"),
            ("attention.value.bias", "self_attn.v_proj.bias", "attn_v.bias"),
            ("attention.query_norm.weight", "self_attn.q_norm.weight", "attn_q_norm.weight"),
            ("attention.key_norm.weight", "self_attn.k_norm.weight", "attn_k_norm.weight"),
            ("attention.output.weight", "self_attn.o_proj.weight", "attn_output.weight"),
            ("ffn_norm.weight", "post_attention_layernorm.weight", "ffn_norm.weight"),
            ("ffn.gate.weight", "mlp.gate_proj.weight", "ffn_gate.weight"),
            ("ffn.up.weight", "mlp.up_proj.weight", "ffn_up.weight"),
            ("ffn.down.weight", "mlp.down_proj.weight", "ffn_down.weight"),
        )
    ),
)
_IN_FILE = {
    "huggingface": {ours: huggingface for ours, huggingface, _ in _NAMES},
    "gguf": {ours: gguf for ours, _, gguf in _NAMES},
}


# What the decoder reads as one weight.
_JOINED = {
    "attention.qkv": ("attention.query", "attention.key", "attention.value"),
    "ffn.gate_up": ("ffn.gate", "ffn.up"),
}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns name to shape of every tensor a checkpoint file holds, e.g. ``layers.3.ffn.up.weight``."""
    d_model, ffn, vocabulary = config.d_model, config.ffn, config.vocabulary
    heads = {"query": config.heads, "key": config.kv_heads, "value": config.kv_heads}
    rows = {name: count * config.head_dim for name, count in heads.items()}
    layer = {
        "attention_norm.weight": (d_model,),
        **{f"attention.{name}.weight": (size, d_model) for name, size in rows.items()},
        "attention.output.weight": (d_model, rows["query"]),
        "ffn_norm.weight": (d_model,),
        "ffn.gate.weight": (ffn, d_model),
        "ffn.up.weight": (ffn, d_model),
        "ffn.down.weight": (d_model, ffn),
    }
    if config.qkv_bias:
        layer |= {f"attention.{name}.bias": (size,) for name, size in rows.items()}
    if config.qk_norm:
        layer |= {f"attention.{name}_norm.weight": (config.head_dim,) for name in ("query", "key")}
    shapes = {"embedding": (vocabulary, d_model), "final_norm.weight": (d_model,)}
    if not config.tied_embeddings:
        shapes["head"] = (vocabulary, d_model)
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def name_in_file(name: str, container: Literal["huggingface", "gguf"]) -> str:
    """Returns what a container calls the tensor ``name`` of ``expected_tensors``."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer is None:
        return _IN_FILE[container][name]
    pattern = name.replace(layer[0], "layers.{}.", 1)
    return _IN_FILE[container][pattern].format(layer[1])


def check_tensors(
    path: str | os.PathLike[str],
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
) -> None:
    """Compares the tensors a file should hold with those it does.

    Raises:
      CheckpointError: a tensor is missing, has another shape, or has no place in the model; the
        message names the file and the tensors.
    """
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(f"{path}: {_listed(missing)} missing; the checkpoint is incomplete.")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {tuple(found[name])}, the config needs "
                f"{tuple(shape)}."
            )
    if extra := [name for name in found if name not in expected]:
        raise CheckpointError(
            f"{path}: {_listed(extra)} not part of the model that the config describes."
        )


def assemble(
    path: str | os.PathLike[str],
    config: ModelConfig,
    fetch: Callable[[str], Any],
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> Params:
    """Fetches every tensor, one weight after the other, and makes the decoder's weights of them.

    Args:
      path: named in errors.
      config: the model.
      fetch: name of ``expected_tensors`` to a NumPy or JAX array of that shape. What is NumPy is
        converted and joined on the host.
      dtype: dtype of the weights.
      mesh: where to place them, each device its part; on one device where None.

    Raises:
      ConfigError: the model cannot be cut for the mesh.
      CheckpointError: a tensor holds NaN or infinity.
    """
    dtype = jnp.dtype(dtype)
    parallel = parallel_config(config, mesh)
    params, finite = {}, {}
    for name, leaf in abstract_params(parallel, dtype).items():
        parts = {part: _on_host(fetch(part)) for part in _parts(name)}
        finite |= {part: is_finite(array) for part, array in parts.items()}
        place = placement(name, leaf.shape, mesh)
        how = (kind(name), config, parallel.kv_heads // config.kv_heads, dtype)
        arrays = list(parts.values())
        if all(isinstance(array, np.ndarray) for array in arrays):
            params[name] = sharding.put(_join(arrays, *how), place)
        else:
            params[name] = _join_program(*how, place)(arrays)
    check_finite(path, finite)
    return params


def check_finite(path: str | os.PathLike[str], finite: Mapping[str, Any]) -> None:
    """Raises the error for tensors that ``is_finite`` found broken.

    Raises:
      CheckpointError: with their names.
    """
    if broken := [name for name, is_sound in jax.device_get(finite).items() if not is_sound]:
        raise CheckpointError(f"{path}: corrupt: {_listed(broken)} not finite.")


def fingerprint(config: ModelConfig, params: Params) -> str:
    """Returns 12 hex digits that tell one set of weights from another.

    A digest of the config and of the first values of every tensor: training or rounding changes
    those, a copy in another container or on another mesh does not.
    """
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
    # Read from the first rank's part, which lies on the first device of process 0.
    first = {name: _first_part(array) for name, array in params.items()}
    for name, values in sorted(jax.device_get(_first_values(first)).items()):
        digest.update(name.encode())
        digest.update(np.asarray(values, np.float32).tobytes())
    return sharding.broadcast(np.frombuffer(digest.digest(), np.uint8)).tobytes().hex()[:12]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object that belongs to a checkpoint.

    Raises:
      CheckpointError: the file cannot be read or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: cut short or corrupt, not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object.")
    return values


def is_finite(array: np.ndarray | jax.Array) -> Any:
    """Whether all values are finite numbers, as a boolean of the host or of the device."""
    array = _on_host(array)
    return np.isfinite(array).all() if isinstance(array, np.ndarray) else _is_finite(array)


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _on_host(array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Views what lies on one CPU as NumPy, which needs no program compiled for every shape."""
    if isinstance(array, np.ndarray):
        return array
    devices = array.devices()
    on_one_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return np.asarray(array) if on_one_cpu else array


def _parts(name: str) -> list[str]:
    """The tensors of a checkpoint file that make one weight of the decoder."""
    return [name.replace(kind(name), part) for part in _JOINED.get(kind(name), [kind(name)])]


def _join(
    parts: list[Any], of: str, config: ModelConfig, copies: int, dtype: jnp.dtype
) -> np.ndarray | jax.Array:
    xp = parts[0].__array_namespace__()
    if of == "attention.qkv":
        heads = (config.kv_heads, -1, config.head_dim)
        by_head = [part.reshape(*heads, *part.shape[1:]) for part in parts]
        joined = replicate_kv_heads(xp.concat(by_head, axis=1), copies)
    else:
        joined = xp.stack(parts) if of in _JOINED else parts[0]
    return joined.astype(dtype, copy=False)


@functools.cache
def _join_program(
    of: str, config: ModelConfig, copies: int, dtype: jnp.dtype, place: Any
) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda parts: _join(parts, of, config, copies, dtype), out_shardings=place)


@jax.jit
def _first_values(params: Params) -> Params:
    return {name: _first_of(name, array) for name, array in params.items()}


def _first_of(name: str, array: jax.Array) -> jax.Array:
    if kind(name) == "attention.qkv":
        array = jnp.stack([array[0, 0], array[0, -2], array[0, -1]])
    elif kind(name) not in _JOINED:
        array = array[None]
    return array.reshape(array.shape[0], -1)[:, :8]


def _first_part(array: jax.Array) -> jax.Array:
    shards = array.addressable_shards
    return min(shards, key=lambda shard: [part.start or 0 for part in shard.index]).data


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown}{rest} are"
