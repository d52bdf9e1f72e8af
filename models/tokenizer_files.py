"""Builds tokenizers from model files: GGUF metadata, a Hugging Face folder, or what was saved.

The file's vocabulary, merges, special tokens and chat template enter, a ``Tokenizer`` leaves.
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from models.errors import CheckpointError
from models.gguf_file import GGUFFile
from models.tokenizer import Tokenizer
from models.weights import read_json

# Pre-tokenisers of GGUF files, named as llama.cpp names them, and how each cuts words from a text.
# SmolLM cuts single digits first; the others' words differ in how many digits stay together.
_PRE_TOKENIZERS = ("smollm", "gpt-2", "qwen2", "llama-bpe")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer | None:
    """Builds the tokenizer that a GGUF file describes; None if it has none.

    Raises:
      CheckpointError: the vocabulary is corrupt, or of a kind that is not supported.
    """
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    kind = file.get("tokenizer.ggml.model", str)
    flavour = file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or flavour not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: tokenizer {kind!r} with pre-tokenizer {flavour!r} is not supported; "
            f"supported: 'gpt2' with {', '.join(_PRE_TOKENIZERS)}."
        )
    tokens, types = (file.get(f"tokenizer.ggml.{key}", list) for key in ("tokens", "token_type"))
    merges = [tuple(line.split(" ")) for line in file.get("tokenizer.ggml.merges", list)]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{file.path}: corrupt: tokens are repeated or lack their types.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocabulary, merges, ignore_merges=flavour == "llama-bpe")  # pyright: ignore[reportArgumentType]
    except Exception as error:  # The Rust library raises plain Exception.
        raise CheckpointError(f"{file.path}: corrupt tokenizer merges ({error}).") from error
    core = tokenizers.Tokenizer(model)
    core.decoder = decoders.ByteLevel()
    core.pre_tokenizer = _pre_tokenizer(flavour)
    if flavour == "qwen2":
        core.normalizer = normalizers.NFC()
    kinds = list(zip(tokens, types, strict=True))
    core.add_special_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == _CONTROL])
    core.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == _USER_DEFINED])

    def token_at(key: str) -> str | None:
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or index >= len(tokens):
            raise CheckpointError(
                f"{file.path}: corrupt: {key} token {index!r} is not in the vocabulary."
            )
        return tokens[index]

    return Tokenizer(
        core,
        bos_token=token_at("bos"),
        eos_token=token_at("eos"),
        add_bos=bool(file.metadata.get("tokenizer.ggml.add_bos_token", flavour == "llama-bpe")),
        stop_ids=[vocabulary[text] for text in (token_at("eot"), token_at("eom")) if text],
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


def tokenizer_from_huggingface(folder: Path) -> Tokenizer | None:
    """Reads ``tokenizer.json`` and what lies beside it; None if the folder has none.

    Raises:
      CheckpointError: a file is corrupt, or the tokenizer is no byte-level BPE.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    core = _core_from_file(path)
    settings = _json_if_there(folder / "tokenizer_config.json")
    generation = _json_if_there(folder / "generation_config.json")
    stops = generation.get(
        "eos_token_id", _json_if_there(folder / "config.json").get("eos_token_id")
    )
    bos, eos = (_token_text(settings.get(key)) for key in ("bos_token", "eos_token"))
    # Some files add the token in a post-processor and do not say so: ask what happens.
    adds = core.encode("", add_special_tokens=True).tokens
    template_file = folder / "chat_template.jinja"
    template = settings.get("chat_template")
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return Tokenizer(
        core,
        bos_token=bos,
        eos_token=eos,
        add_bos=bos is not None and (settings.get("add_bos_token") is True or adds[:1] == [bos]),
        stop_ids=[stops] if isinstance(stops, int) else stops or [],
        chat_template=template,
    )


def tokenizer_from_saved(folder: Path) -> Tokenizer | None:
    """Reads what ``Tokenizer.save`` wrote; None if the folder has none.

    Raises:
      CheckpointError: a file is missing or corrupt.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    settings = read_json(folder / "tokenizer_settings.json")
    try:
        return Tokenizer(_core_from_file(path), **settings)
    except TypeError as error:
        raise CheckpointError(f"{folder}: corrupt tokenizer_settings.json ({error}).") from error


def _pre_tokenizer(flavour: str) -> pre_tokenizers.PreTokenizer:
    if flavour in ("smollm", "gpt-2"):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        cuts_digits = flavour == "smollm"
        return pre_tokenizers.Sequence([digits, byte_level]) if cuts_digits else byte_level
    words = Regex(_WORDS.replace("DIGITS", "{1,3}" if flavour == "llama-bpe" else ""))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), byte_level])


def _core_from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The Rust library raises plain Exception.
        raise CheckpointError(f"{path}: cut short or corrupt ({error}).") from error


def _json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
