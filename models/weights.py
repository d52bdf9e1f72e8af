"""From a file's named tensors to the decoder's weights, with every name and shape checked.

What a checkpoint claims to hold enters (names and shapes) and is compared with what the config
needs; then arrays enter and the pytree of ``decoder_step`` leaves. The tables of names are those of
Hugging Face transformers and of llama.cpp's GGUF; in both, matrices are ``[out, in]`` as here.
"""

import dataclasses
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
from jaxtyping import DTypeLike

from models.config import ModelConfig
from models.decoder import Params, abstract_params
from models.errors import CheckpointError

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


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns name to shape of every tensor the config needs, e.g. ``layers.3.ffn.up.weight``."""
    # One layer stands for all: a corrupt number of layers must not cost a trace of each.
    one = _named(abstract_params(dataclasses.replace(config, layers=1)))
    shapes = {}
    for name, leaf in one.items():
        copies = range(config.layers) if name.startswith("layers.0.") else [0]
        shapes |= {name.replace("layers.0.", f"layers.{i}.", 1): leaf.shape for i in copies}
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
) -> Params:
    """Fetches every tensor, one after the other, and joins them to the pytree of weights.

    Args:
      path: named in errors.
      config: the model.
      fetch: name of ``expected_tensors`` to a NumPy or JAX array of that shape.
      dtype: dtype of the weights; conversion from NumPy happens on the host.

    Raises:
      CheckpointError: a tensor holds NaN or infinity.
    """
    dtype = jnp.dtype(dtype)
    target = abstract_params(config, dtype)
    arrays, finite = [], {}
    for name in _named(target):
        array = fetch(name)
        finite[name] = _is_finite(array)
        if isinstance(array, np.ndarray):
            array = array.astype(dtype, copy=False)
        arrays.append(jnp.asarray(array, dtype=dtype))
    if broken := [name for name, is_finite in jax.device_get(finite).items() if not is_finite]:
        raise CheckpointError(f"{path}: corrupt: {_listed(broken)} not finite.")
    return jax.tree.unflatten(jax.tree.structure(target), arrays)


def named_arrays(params: Params) -> dict[str, jax.Array]:
    """Returns the weights by the names of ``expected_tensors``."""
    return _named(params)


def fingerprint(config: ModelConfig, params: Params) -> str:
    """Returns 12 hex digits that tell one set of weights from another.

    A digest of the config and of the first values of every tensor: training or rounding changes
    those, a copy in another container does not.
    """
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
    starts = jax.device_get(_first_values(_named(params)))
    for name, values in sorted(starts.items()):
        digest.update(name.encode())
        digest.update(np.asarray(values, np.float32).tobytes())
    return digest.hexdigest()[:12]


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


@jax.jit
def _first_values(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: array[(0,) * (array.ndim - 1)][:64] for name, array in arrays.items()}


@jax.jit
def _is_finite_on_device(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _is_finite(array: np.ndarray | jax.Array) -> Any:
    if isinstance(array, np.ndarray) or next(iter(array.devices())).platform == "cpu":
        # NumPy needs no program compiled for every shape.
        return np.isfinite(np.asarray(array)).all()
    return _is_finite_on_device(array)


def _named(tree: Any) -> dict[str, Any]:
    # A leaf's path ends in the attribute of the Param that holds it.
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(key.key) for key in path[:-1]): leaf for path, leaf in leaves}


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown}{rest} are"
