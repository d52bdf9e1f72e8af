"""Models from Hugging Face folders: what was saved is what runs, and what is wrong is named."""

import dataclasses
import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from model_files import (
    LLAMA,
    bfloat16_grid,
    cut,
    edit_json,
    file_tensors,
    weights_for,
    write_huggingface,
)

import models
from models import CheckpointError, RopeScaling

UNTIED = dataclasses.replace(LLAMA, tied_embeddings=False)


@pytest.fixture
def folder(tmp_path):
    write_huggingface(tmp_path / "model", LLAMA, weights_for(LLAMA), shards=3)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32)}),
        ("qwen2", {"qkv_bias": True, "tied_embeddings": False}),
        ("qwen3", {"qk_norm": True}),
    ],
)
def test_folder_gives_its_config_and_weights(tmp_path, family, variant):
    config = dataclasses.replace(LLAMA, **variant)
    weights = weights_for(config)
    write_huggingface(tmp_path / "model", config, weights, family=family)
    loaded = models.load(tmp_path / "model")
    assert loaded.config == config
    arrays = file_tensors(config, loaded.model.params)
    assert arrays.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(arrays[name], weight)


def test_shards_are_read_by_their_index(folder):
    # A file that the index does not list is not part of the model.
    safetensors.numpy.save_file({"x": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    arrays = file_tensors(LLAMA, models.load(folder).model.params)
    for name, weight in weights_for(LLAMA).items():
        np.testing.assert_array_equal(arrays[name], weight)


def test_weights_come_in_the_dtype_that_was_asked_for(tmp_path):
    weights = bfloat16_grid(weights_for(LLAMA))
    write_huggingface(tmp_path / "model", LLAMA, weights)
    loaded = models.load(tmp_path / "model", dtype="bfloat16")
    arrays = file_tensors(LLAMA, loaded.model.params)
    assert {array.dtype.name for array in arrays.values()} == {"bfloat16"}
    for name, weight in weights.items():
        np.testing.assert_array_equal(np.asarray(arrays[name], np.float32), weight)


def test_head_that_repeats_a_tied_embedding_is_ignored(tmp_path):
    weights = weights_for(LLAMA)
    write_huggingface(tmp_path / "model", LLAMA, weights | {"head": weights["embedding"]})
    assert "head" not in models.load(tmp_path / "model").model.params


def test_rotary_settings_of_transformers_5_are_understood(folder):
    edit_json(
        folder / "config.json",
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    assert models.load(folder).config == LLAMA


def test_missing_shard_is_named(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 weight files .*model-00002-of-00003"):
        models.load(folder)


@pytest.mark.parametrize("fraction", [0.0, 0.0005, 0.02, 0.5, 0.9999])
def test_shard_cut_short_is_named(folder, fraction):
    cut(folder / "model-00003-of-00003.safetensors", fraction)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: cut short"):
        models.load(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
    ],
)
def test_corrupt_header_is_named(folder, header):
    path = folder / "model-00001-of-00003.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors: corrupt"):
        models.load(folder)


def test_header_longer_than_the_file_is_not_believed(folder):
    path = folder / "model-00001-of-00003.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + bytes(64))
    with pytest.raises(CheckpointError, match="no complete safetensors header"):
        models.load(folder)


def rewrite(folder, **tensors):
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    changed = {name.replace("__", "."): array for name, array in tensors.items()}
    merged = {name: array for name, array in (weights | changed).items() if array is not None}
    safetensors.numpy.save_file(merged, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, r"tensor 'model\.norm\.weight' is missing"),
        ({"lm_head__bias": np.ones(3, np.float32)}, r"tensor 'lm_head\.bias' is not part"),
        (
            {"model__norm__weight": np.ones(31, np.float32)},
            r"'model\.norm\.weight' has shape \(31,\), the config needs \(32,\)",
        ),
        ({"model__norm__weight": np.ones(32, np.int8)}, "dtype I8; only floating-point"),
        ({"lm_head__weight": np.full((300, 32), np.inf, np.float32)}, "'head' is not finite"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, tensors, message):
    write_huggingface(tmp_path / "model", UNTIED, weights_for(UNTIED))
    rewrite(tmp_path / "model", **tensors)
    with pytest.raises(CheckpointError, match=message):
        models.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not supported; supported: llama, qwen2, qwen3"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000"),
        ({"num_key_value_heads": 5}, "6 query heads cannot share 5 KV heads"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling: "),
        ({"rope_scaling": "llama3"}, "rotary settings are 'llama3'"),
    ],
)
def test_wrong_config_is_explained(folder, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"config\.json: .*" + message):
        models.load(folder)


def test_config_cut_short_is_named(folder):
    cut(folder / "config.json", 0.5)
    with pytest.raises(CheckpointError, match=r"config\.json: cut short or corrupt, not JSON"):
        models.load(folder)


def test_index_that_is_no_table_is_named(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["a"]}))
    with pytest.raises(CheckpointError, match=r"index\.json: corrupt: 'weight_map'"):
        models.load(folder)


def test_folder_without_weights_is_explained(folder):
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors files"):
        models.load(folder)
