"""Models from GGUF files: row order, dequantisation, and files that are not what they should be."""

import contextlib
import dataclasses
import struct

import gguf
import numpy as np
import pytest
from decoder_reference import forward
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import LLAMA, cut, file_tensors, plain_logits, weights_for, write_gguf

import models
from models import CheckpointError, RopeScaling
from models.from_gguf import config_from_gguf, half_rotation_order, smollm2_path
from models.gguf_file import read_gguf

TOKENS, POSITIONS = [5, 299, 0, 17, 17, 8], [0, 1, 2, 3, 4, 5]


def test_row_order_is_turned_from_neighbours_to_halves():
    # Two heads of four rows; in the file, rows of a pair are neighbours.
    in_file = np.array([[0.0], [2.0], [1.0], [3.0], [10.0], [12.0], [11.0], [13.0]])
    expected = np.array([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [12.0], [13.0]])
    np.testing.assert_array_equal(half_rotation_order(in_file, heads=2), expected)


def test_llama_file_gives_the_logits_of_interleaved_rotation(tmp_path):
    weights = weights_for(LLAMA)
    write_gguf(tmp_path / "m.gguf", LLAMA, weights)
    loaded = models.load(tmp_path / "m.gguf")
    assert loaded.config == LLAMA
    expected = forward(LLAMA, weights, TOKENS, POSITIONS, interleaved=True)
    np.testing.assert_allclose(
        plain_logits(loaded.model, TOKENS), expected, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("architecture", "variant"), [("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True})]
)
def test_qwen_file_is_in_half_rotation_order_already(tmp_path, architecture, variant):
    config = dataclasses.replace(LLAMA, tied_embeddings=False, **variant)
    weights = weights_for(config)
    write_gguf(tmp_path / "m.gguf", config, weights, architecture=architecture)
    loaded = models.load(tmp_path / "m.gguf")
    assert loaded.config == config
    name = "layers.1.attention.query.weight"
    query = file_tensors(config, loaded.model.params)[name]
    np.testing.assert_array_equal(query, weights[name])


def test_blocks_are_dequantised_as_scale_times_integer(tmp_path):
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.01, 0.02, (64, 1)).astype(np.float16)
    integers = rng.integers(-127, 128, (64, 32), dtype=np.int8)
    blocks = np.concatenate([scales.view(np.uint8), integers.view(np.uint8)], axis=1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = scales.astype(np.float32) * integers.astype(np.float32)
    np.testing.assert_array_equal(read_gguf(tmp_path / "m.gguf").dequantise("w"), expected)


def test_rope_factors_of_llama_3_are_recognised(tmp_path):
    config = dataclasses.replace(
        LLAMA, rope_theta=5e5, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192)
    )
    frequencies = 5e5 ** (-np.arange(8) / 8)
    turns = 8192 * frequencies / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / (kept + (1 - kept) / 32)).astype(np.float32)
    path = tmp_path / "m.gguf"
    write_gguf(path, config, weights_for(config), tensors={"rope_freqs.weight": factors})
    assert config_from_gguf(read_gguf(path)) == config
    write_gguf(
        path, config, weights_for(config), tensors={"rope_freqs.weight": factors[::-1].copy()}
    )
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*Llama-3\.1 rule"):
        config_from_gguf(read_gguf(path))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, r"tensor 'blk\.1\.ffn_up\.weight' is missing"),
        ({"token_embd.weight": None}, r"tensor 'token_embd\.weight' is missing"),
        ({"blk.2.x": np.ones(4, np.float32)}, r"tensor 'blk\.2\.x' is not part of the model"),
        (
            {"blk.0.attn_k.weight": np.ones((30, 32), np.float32)},
            r"'blk\.0\.attn_k\.weight' has shape \(30, 32\), the config needs \(32, 32\)",
        ),
        (
            {"output_norm.weight": np.full(32, np.nan, np.float32)},
            r"tensor 'final_norm\.weight' is not finite",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, tensors, message):
    write_gguf(tmp_path / "m.gguf", LLAMA, weights_for(LLAMA), tensors=tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*" + message):
        models.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": None}, r"no 'llama\.block_count'"),
        ({"block_count": 2.0}, r"'llama\.block_count' must be int"),
        ({"attention.head_count_kv": 4}, "6 query heads cannot share 4 KV heads"),
        ({"block_count": 3}, r"blk\.2\..* missing"),
        ({"rope.dimension_count": 8}, "part of the head"),
    ],
)
def test_wrong_metadata_is_explained(tmp_path, metadata, message):
    write_gguf(tmp_path / "m.gguf", LLAMA, weights_for(LLAMA), metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        models.load(tmp_path / "m.gguf")


def test_other_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, weights_for(LLAMA), architecture="gemma")
    with pytest.raises(CheckpointError, match="'gemma' is not supported; supported: llama, qwen2"):
        models.load(tmp_path / "m.gguf")


def test_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, weights_for(LLAMA))
    whole = path.read_bytes()
    for length in [0, 3, 10, 23, 24, 40, 100, 300, 600, 1000, 2000, 5000, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(
            CheckpointError, match=r"m\.gguf: (cut short|not a GGUF|cannot be read)"
        ):
            read_gguf(path)


def test_real_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "smollm2.gguf"
    path.write_bytes(smollm2_path().read_bytes()[:50_000_000])
    with pytest.raises(CheckpointError, match=r"smollm2\.gguf: cut short: tensor 'blk\.\d+\."):
        models.load(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_header_loads_or_is_refused_but_never_crashes(tmp_path, data):
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf(path, LLAMA, weights_for(LLAMA))
    whole = path.read_bytes()
    header = read_gguf(path).tensors["token_embd.weight"].start
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    other = tmp_path / "damaged.gguf"
    other.write_bytes(damaged)
    with contextlib.suppress(CheckpointError):
        models.load(other)


def test_count_that_the_file_cannot_hold_is_not_believed(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(100))
    with pytest.raises(CheckpointError, match=r"number of tensors is 1152921504606846976"):
        read_gguf(path)


def test_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        models.load(path)


def test_cut_tensor_data_names_the_tensor(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, weights_for(LLAMA))
    cut(path, 0.999)
    with pytest.raises(
        CheckpointError, match=r"cut short: tensor '.*' ends at byte \d+, the file at"
    ):
        models.load(path)
