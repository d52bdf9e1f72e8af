"""Tokenizers from model files: each flavour of GGUF, Hugging Face folders, and damaged files."""

import json

import gguf
import pytest
import tokenizers
from tokenizers import processors

from models import CheckpointError
from models.from_gguf import smollm2_path
from models.gguf_file import read_gguf
from models.tokenizer_files import tokenizer_from_gguf, tokenizer_from_huggingface

IM_START = 1
USER = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_from_gguf(read_gguf(smollm2_path()))


def byte_pair_file(path, flavour, **changes):
    """A GGUF file with the 256 bytes, three merges of digits and one special token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    values = {
        "tokens": [*alphabet, "12", "123", "1234", "<s>"],
        "token_type": [1] * 259 + [3],
        "merges": ["1 2", "12 3", "123 4"],
        "pre": flavour,
        "bos_token_id": 259,
    } | changes
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    for key, value in values.items():
        kinds = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        kinds[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_gguf(path)


@pytest.mark.parametrize(
    ("flavour", "tokens"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("gpt-2", ["1234"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_each_flavour_cuts_digits_its_way(tmp_path, flavour, tokens):
    built = tokenizer_from_gguf(byte_pair_file(tmp_path / "m.gguf", flavour))
    assert built is not None
    assert [built.decode([index]) for index in built.encode("1234", bos=False)] == tokens


def test_llama_3_text_begins_with_the_beginning_of_text(tmp_path):
    built = tokenizer_from_gguf(byte_pair_file(tmp_path / "m.gguf", "llama-bpe"))
    assert built is not None
    assert built.encode("123") == [259, 257]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"merges": ["1 2", "9 99"]}, "corrupt tokenizer merges"),
        ({"merges": ["12"]}, "corrupt tokenizer merges"),
        ({"token_type": [1] * 200}, "lack their types"),
        ({"bos_token_id": 260}, "bos token 260 is not in the vocabulary"),
        ({"pre": "deepseek-v3"}, "pre-tokenizer 'deepseek-v3' is not supported.*smollm"),
    ],
)
def test_wrong_vocabulary_is_explained(tmp_path, changes, complaint):
    file = byte_pair_file(tmp_path / "m.gguf", "smollm", **changes)
    with pytest.raises(CheckpointError, match=complaint):
        tokenizer_from_gguf(file)


def huggingface_folder(tokenizer, folder, post_processor=None, **files):
    tokenizer.save(folder)
    if post_processor is not None:
        core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        core.post_processor = post_processor
        core.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_settings.json").read_text())
    (folder / "tokenizer_settings.json").unlink()
    tokenizer_config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": settings["chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    read = tokenizer_from_huggingface(folder)
    assert read is not None
    return read


def test_tokenizer_json_gives_the_same_ids(tokenizer, tmp_path):
    read = huggingface_folder(tokenizer, tmp_path)
    text = "It's 2024 <|im_end|> 世界"
    assert read.encode(text) == tokenizer.encode(text)
    assert read.encode_chat(USER) == tokenizer.encode_chat(USER)
    assert read.stop_ids == tokenizer.stop_ids


def test_stop_ids_of_the_generation_config_are_kept(tokenizer, tmp_path):
    read = huggingface_folder(
        tokenizer, tmp_path, generation_config__json=json.dumps({"eos_token_id": [2, 16]})
    )
    assert read.stop_ids == {0, 2, 16}


def test_beginning_added_by_a_post_processor_is_kept(tokenizer, tmp_path):
    adds_bos = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", IM_START)])
    read = huggingface_folder(tokenizer, tmp_path, post_processor=adds_bos)
    assert read.encode("hi") == [IM_START, *tokenizer.encode("hi")]
    assert read.encode("hi", bos=False) == tokenizer.encode("hi")


def test_template_in_its_own_file_is_read(tokenizer, tmp_path):
    read = huggingface_folder(
        tokenizer, tmp_path, chat_template__jinja="{{ messages[0]['content'] }}!"
    )
    assert read.render_chat(USER) == "What is 2 + 2?!"


def test_folder_without_a_tokenizer_has_none(tmp_path):
    assert tokenizer_from_huggingface(tmp_path) is None


def test_tokenizer_json_cut_short_is_named(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cut short or corrupt"):
        tokenizer_from_huggingface(tmp_path)


def test_tokenizer_that_is_no_byte_level_bpe_is_refused(tokenizer, tmp_path):
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="not a byte-level BPE"):
        tokenizer_from_huggingface(tmp_path)
