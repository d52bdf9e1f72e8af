"""Writes small model files the way their makers do, with the packages that define the formats."""

import functools
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from decoder_reference import random_weights

from models import ModelConfig, plain_attend
from models.weights import expected_tensors, name_in_file

LLAMA = ModelConfig(
    layers=2,
    d_model=32,
    ffn=64,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vocabulary=300,
    max_context=128,
    rope_theta=1e4,
    eps=1e-5,
    tied_embeddings=True,
)


def weights_for(config, seed=0):
    return random_weights(expected_tensors(config), seed)


def write_gguf(path, config, weights, *, architecture="llama", tensors=None, metadata=None):
    """``tensors`` adds to or replaces tensors by their GGUF names; None leaves one out."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": config.layers,
        "context_length": config.max_context,
        "embedding_length": config.d_model,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.eps,
    }
    for key, value in (values | (metadata or {})).items():
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    stored = {name_in_file(name, "gguf"): array for name, array in weights.items()}
    for name, array in (stored | (tensors or {})).items():
        if array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def huggingface_config(config, family):
    values = {
        "model_type": family,
        "hidden_act": "silu",
        "num_hidden_layers": config.layers,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.max_context,
        "rope_theta": int(config.rope_theta),
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied_embeddings,
    }
    if config.rope_scaling is not None:
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_frequency_factor,
            "high_freq_factor": config.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": config.rope_scaling.original_context,
        }
    return values


def write_huggingface(folder, config, weights, *, family="llama", shards=1):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(huggingface_config(config, family)))
    stored = {name_in_file(name, "huggingface"): array for name, array in weights.items()}
    if shards == 1:
        safetensors.numpy.save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return
    table = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(stored.items())[shard::shards])
        safetensors.numpy.save_file(part, folder / name, {"format": "pt"})
        table |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_json(path, **changes):
    """Changes keys of a JSON file; ``None`` removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in values.items() if v is not None}))


def file_tensors(config, params):
    """The tensors of a checkpoint file, taken out of the decoder's joined weights one by one."""
    tensors = {}
    for name, array in params.items():
        array = np.asarray(array)
        layer = ".".join(name.split(".")[:2])
        kind = name.rsplit(".", 1)[-1]
        if ".qkv." in name:
            kv_heads, width = array.shape[:2]
            heads = [(k, g) for k in range(kv_heads) for g in range(width - 2)]
            query = [array[k, g] for k, g in heads]
            key, value = ([array[k, g] for k in range(kv_heads)] for g in (width - 2, width - 1))
            for part, rows in (("query", query), ("key", key), ("value", value)):
                tensors[f"{layer}.attention.{part}.{kind}"] = np.concatenate(rows)
        elif ".gate_up." in name:
            tensors[f"{layer}.ffn.gate.{kind}"], tensors[f"{layer}.ffn.up.{kind}"] = array
        else:
            tensors[name] = array
    assert tensors.keys() == expected_tensors(config).keys()
    return tensors


def plain_logits(model, tokens, positions=None, rows=None):
    """Logits of a plain forward pass without a cache."""
    tokens = jnp.array(tokens)
    positions = jnp.arange(len(tokens)) if positions is None else jnp.array(positions)
    rows = None if rows is None else jnp.array(rows)
    return np.asarray(_plain_forward(model.step, model.params, tokens, positions, rows))


@functools.partial(jax.jit, static_argnames="step")
def _plain_forward(step, params, tokens, positions, rows):
    return step(params, tokens, positions, None, plain_attend, rows)[0]


def cut(path, fraction):
    """Keeps the first part of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])


def bfloat16_grid(weights):
    """Rounds weights to what bfloat16 holds exactly."""
    return {
        name: (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        for name, array in weights.items()
    }
