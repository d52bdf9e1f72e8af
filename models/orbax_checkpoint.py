"""KVGrain's own checkpoint folder: weights in Orbax, config and tokenizer beside them.

::

    FOLDER/kvgrain.json           format, name and config; written last
    FOLDER/weights/               Orbax checkpoint: one array for each weight of the decoder
    FOLDER/tokenizer.json         and tokenizer_settings.json, if the model has a tokenizer

A folder without ``kvgrain.json`` is a conversion that did not finish, or no checkpoint.
"""

import json
import os
import tempfile
from pathlib import Path

import jax
from jax.sharding import Mesh
from jaxtyping import DTypeLike
from orbax.checkpoint import v1 as ocp

from kvgrain_jax.errors import ConfigError
from models.config import ModelConfig
from models.decoder import Params, abstract_params
from models.errors import CheckpointError
from models.tensor_parallel import parallel_config, placement, replicate_kv_heads, target
from models.tokenizer import Tokenizer
from models.weights import check_finite, check_tensors, is_finite, read_json

MANIFEST = "kvgrain.json"
_WEIGHTS = "weights"
_FORMAT = 2


def empty_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes the folder for a checkpoint where it is missing.

    Raises:
      CheckpointError: the folder holds files already or cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}).") from error
    if not is_empty:
        raise CheckpointError(
            f"{folder}: holds files already; name a folder that is empty or does not exist."
        )
    return folder


def write_checkpoint(
    folder: str | os.PathLike[str],
    *,
    name: str,
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None,
) -> None:
    """Writes a checkpoint folder that ``models.load`` reads.

    Args:
      folder: must be empty or not exist yet.
      name: what the model calls itself.
      config: the model.
      params: its weights, in the dtype they shall have in the file.
      tokenizer: its tokenizer, if it has one.

    Raises:
      CheckpointError: the folder holds files already or cannot be written.
    """
    folder = empty_folder(folder)
    # Weights hardly compress, and trying takes far longer than writing them.
    context = ocp.Context()
    context.array.saving.use_compression = False
    try:
        with context:
            ocp.save(str(folder.resolve() / _WEIGHTS), params)
        if tokenizer is not None:
            tokenizer.save(folder)
        manifest = {
            "format": _FORMAT,
            "name": name,
            "config": config.to_json(),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}).") from error


def read_manifest(folder: Path) -> tuple[str, ModelConfig]:
    """Returns name and config of a checkpoint folder.

    Raises:
      CheckpointError: the manifest is corrupt or of another format.
    """
    path = folder / MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.get('format')!r} cannot be read, only {_FORMAT}; convert the "
            "model again."
        )
    name, config = manifest.get("name"), manifest.get("config")
    if not isinstance(name, str) or not isinstance(config, dict):
        raise CheckpointError(f"{path}: corrupt: name or config is missing.")
    try:
        return name, ModelConfig.from_json(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: corrupt: {error}") from error


def read_params(
    folder: Path, config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None
) -> Params:
    """Reads the weights of a checkpoint folder in ``dtype``, each device of ``mesh`` its part.

    Raises:
      ConfigError: the model cannot be cut for the mesh.
      CheckpointError: the weights are missing, cut short or corrupt, or do not fit the config.
    """
    path = str((folder / _WEIGHTS).resolve())
    copies = parallel_config(config, mesh).kv_heads // config.kv_heads
    try:
        found = {name: leaf.shape for name, leaf in ocp.metadata(path).metadata.items()}
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged folder.
        raise CheckpointError(f"{path}: cut short or corrupt: {_first_line(error)}") from error
    expected = abstract_params(config, dtype)
    check_tensors(path, {name: leaf.shape for name, leaf in expected.items()}, found)
    wanted = {name: target(name, leaf.shape, dtype, mesh) for name, leaf in expected.items()}
    try:
        params: Params = ocp.load(path, wanted)
    except Exception as error:
        raise CheckpointError(f"{path}: cut short or corrupt: {_first_line(error)}") from error
    check_finite(path, {name: is_finite(array) for name, array in params.items()})
    if copies > 1:
        params |= _with_copies(
            {n: array for n, array in params.items() if ".qkv." in n}, copies, mesh
        )
    return params


def _with_copies(qkv: Params, copies: int, mesh: Mesh | None) -> Params:
    def replicate(arrays: Params) -> Params:
        return {name: replicate_kv_heads(array, copies) for name, array in arrays.items()}

    shapes = jax.eval_shape(replicate, qkv)
    places = {name: placement(name, leaf.shape, mesh) for name, leaf in shapes.items()}
    return jax.jit(replicate, out_shardings=places)(qkv)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
