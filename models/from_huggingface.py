"""A model from a Hugging Face folder: ``config.json`` and ``*.safetensors``, read through Orbax.

Every header is checked against its file before Orbax reads the bytes, so that a shard that is
missing, cut short or of another model is named in the error.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import DTypeLike
from orbax.checkpoint import v1 as ocp

from kvgrain_jax.errors import ConfigError
from models.config import ModelConfig
from models.decoder import Params
from models.errors import CheckpointError
from models.tensor_parallel import target
from models.weights import assemble, check_tensors, expected_tensors, name_in_file, read_json

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 100_000_000  # the format's own limit
_INDEX = "model.safetensors.index.json"


def config_from_huggingface(folder: Path) -> ModelConfig:
    """Reads ``config.json`` of a Llama, Qwen2 or Qwen3 model.

    Raises:
      CheckpointError: the file is missing or corrupt, or asks for what the decoder does not do
        (another family, sliding windows, other rope scalings, quantised weights).
    """
    path = folder / "config.json"
    values = read_json(path)
    family = values.get("model_type")
    if family not in ("llama", "qwen2", "qwen3"):
        raise CheckpointError(
            f"{path}: model_type {family!r} is not supported; supported: llama, qwen2, qwen3."
        )
    unsupported = {
        "attention_bias": bool(values.get("attention_bias")),
        "mlp_bias": bool(values.get("mlp_bias")),
        "use_sliding_window": bool(values.get("use_sliding_window")),
        "quantization_config": bool(values.get("quantization_config")),
        "hidden_act": values.get("hidden_act", "silu") != "silu",
    }
    if asked := [key for key, is_asked in unsupported.items() if is_asked]:
        raise CheckpointError(f"{path}: {asked[0]} = {values[asked[0]]!r} is not supported.")

    def value(key: str, default: Any = None) -> Any:
        found = values.get(key)
        if found is None and default is None:
            raise CheckpointError(f"{path}: {key!r} is missing.")
        return default if found is None else found

    # transformers 5 moved the rotary settings into one object.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{path}: corrupt: the rotary settings are {rope!r:.60}.")
    heads, d_model = value("num_attention_heads"), value("hidden_size")
    for key in ("num_attention_heads", "hidden_size"):
        if type(values[key]) is not int or values[key] < 1:
            raise CheckpointError(f"{path}: corrupt: {key} is {values[key]!r}.")
    try:
        return ModelConfig.from_json(
            {
                "layers": value("num_hidden_layers"),
                "d_model": d_model,
                "ffn": value("intermediate_size"),
                "heads": heads,
                "kv_heads": value("num_key_value_heads", heads),
                "head_dim": value("head_dim", d_model // heads),
                "vocabulary": value("vocab_size"),
                "max_context": value("max_position_embeddings"),
                "rope_theta": rope.get("rope_theta") or value("rope_theta"),
                "rope_scaling": _rope_scaling(path, rope),
                "eps": value("rms_norm_eps"),
                "tied_embeddings": value("tie_word_embeddings", False),
                "qkv_bias": family == "qwen2",
                "qk_norm": family == "qwen3",
            }
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: corrupt: {error}") from error


def params_from_huggingface(
    folder: Path, config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None
) -> Params:
    """Reads all weights of a folder in ``dtype``, one file after the other.

    Each device of ``mesh`` receives its part only.

    Raises:
      ConfigError: the model cannot be cut for the mesh.
      CheckpointError: a file is missing, cut short or corrupt, or tensors are missing, extra,
        misshapen, quantised or not finite.
    """
    in_file = {name: name_in_file(name, "huggingface") for name in expected_tensors(config)}
    expected = {in_file[name]: shape for name, shape in expected_tensors(config).items()}
    files = {path: _checked_header(path) for path in _weight_files(folder)}
    found: dict[str, tuple[int, ...]] = {}
    for path, header in files.items():
        for name, shape in header.items():
            if name in found:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is in another file of {folder} too."
                )
            # Old exports keep what is not a weight; a tied head repeats the embedding.
            tied_head = config.tied_embeddings and name == "lm_head.weight"
            if not name.endswith(".rotary_emb.inv_freq") and not tied_head:
                found[name] = shape
    check_tensors(folder, expected, found)

    ours = {in_file[name]: name for name in in_file}
    arrays: dict[str, Any] = {}
    for path, header in files.items():
        shapes = {ours[name]: shape for name, shape in header.items() if name in ours}
        wanted = {name: target(name, shape, dtype, mesh) for name, shape in shapes.items()}
        read = _read(path, {in_file[name]: wanted[name] for name in wanted})
        arrays |= {ours[name]: array for name, array in read.items()}
    return assemble(folder, config, arrays.pop, dtype, mesh)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no *.safetensors files.")
        return files
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{index}: corrupt: 'weight_map' must map tensors to file names.")
    files = [folder / name for name in sorted(set(table.values()))]
    if missing := [path.name for path in files if not path.is_file()]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} weight files that {_INDEX} lists are missing, "
            f"{missing[0]} first."
        )
    return files


def _checked_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape of a safetensors file, its lengths held against the file's."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{path}: cut short or corrupt: no complete safetensors header.")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
            spans = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
            kinds = {name: entry["dtype"] for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: corrupt safetensors header ({error}).") from error
    for name, shape in shapes.items():
        if kinds[name] not in _ITEM_BYTES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {kinds[name]}; only floating-point weights can be "
                f"read ({', '.join(_ITEM_BYTES)})."
            )
        if not all(type(number) is int and number >= 0 for number in (*shape, *spans[name])):
            raise CheckpointError(
                f"{path}: corrupt: tensor {name!r} has a senseless shape or place."
            )
        begin, end = spans[name] if len(spans[name]) == 2 else (0, -1)
        if end - begin != math.prod(shape) * _ITEM_BYTES[kinds[name]]:
            raise CheckpointError(f"{path}: corrupt: tensor {name!r} and its byte range disagree.")
        if 8 + length + end > size:
            raise CheckpointError(
                f"{path}: cut short: tensor {name!r} ends at byte {8 + length + end}, the file at "
                f"{size}."
            )
    return shapes


def _read(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    try:
        with context:
            return ocp.load(str(path.resolve()), wanted) if wanted else {}
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error


def _rope_scaling(path: Path, rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(
            f"{path}: rope scaling {kind!r} is not supported; supported: default, llama3."
        )
    return {
        "factor": rope.get("factor"),
        "low_frequency_factor": rope.get("low_freq_factor"),
        "high_frequency_factor": rope.get("high_freq_factor"),
        "original_context": rope.get("original_max_position_embeddings"),
    }
