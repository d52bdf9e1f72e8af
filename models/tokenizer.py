"""Text and conversations to token ids and back, with a byte-level BPE and the model's own template.

Text is always encoded as text: nothing that a user writes becomes a special token unless the caller
asks for it. ``tokenizer_files`` builds a ``Tokenizer`` from a model's files.
"""

import codecs
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from kvgrain_jax.errors import RequestError
from models.chat import Message, compile_template, render, shield
from models.errors import CheckpointError

# How models of these families end a turn or a text. Files often name one as end of sequence and
# leave the others to the caller.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


class Tokenizer:
    """Encodes text and conversations, decodes ids at once or as a stream.

    Attributes:
      bos_id: id put before plain text, or None.
      stop_ids: ids that end an answer.
      special_ids: ids of control tokens, which decoding leaves out.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
        stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        if not isinstance(core.decoder, decoders.ByteLevel):
            raise CheckpointError(
                "The tokenizer is not a byte-level BPE; only those are supported."
            )
        # From here on special tokens in a text are text; they are cut out before, where asked.
        core.encode_special_tokens = True
        self._core = core
        self._bos_token, self._eos_token = bos_token, eos_token
        self._chat_source = chat_template
        self._template = compile_template(chat_template) if chat_template else None
        added = core.get_added_tokens_decoder()
        self._added = {index: token.content.encode() for index, token in added.items()}
        special = {token.content: index for index, token in added.items() if token.special}
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        # (?!) matches nothing: a tokenizer may have no special tokens.
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._bytes = functools.lru_cache(maxsize=None)(self._token_bytes)
        self.special_ids = frozenset(special.values())
        self.bos_id = self._id_of(bos_token) if add_bos else None
        ends = [special[text] for text in _ENDS if text in special]
        eos = self._id_of(eos_token)
        self.stop_ids = frozenset((*ends, *stop_ids, *(() if eos is None else (eos,))))

    @property
    def vocabulary(self) -> int:
        """Number of ids the tokenizer knows; a model's embedding may have more rows."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        """Returns the ids of a text.

        Bytes for which the vocabulary has no token are lost, as in the model's own tokenizer:
        SmolLM2 has none for six control characters and for planes 4 to 11 of Unicode.

        Args:
          text: any string without lone surrogates.
          special: read special tokens in the text (``<|im_start|>``) as such. Off by default: they
            are then encoded letter by letter, and a user's text cannot end a turn or open one.
          bos: put the beginning-of-sequence id first, if this model's convention has one.

        Raises:
          RequestError: ``text`` is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The text is not valid Unicode: {error}.") from error
        prefix = [self.bos_id] if bos and self.bos_id is not None else []
        if not special:
            return prefix + self._core.encode(text, add_special_tokens=False).ids
        return prefix + self._encode_marked(text, mark="")

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Returns the ids of a conversation in the model's chat template.

        The template's special tokens become special ids; the same characters inside a message stay
        text.

        Args:
          messages: mappings with ``role`` and ``content``, oldest first.
          add_generation_prompt: end with the opening of the assistant's answer.
          **variables: further variables of the template.

        Raises:
          RequestError: the model has no template, or a message is malformed or refused by it.
        """
        shielded, mark = shield(messages, self._special_pattern)
        text = self.render_chat(shielded, add_generation_prompt=add_generation_prompt, **variables)
        return self._encode_marked(text, mark)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the text of a conversation in the model's chat template, to look at.

        Raises:
          RequestError: as ``encode_chat``.
        """
        if self._template is None:
            raise RequestError("This model has no chat template; give it plain text.")
        names = {"bos_token": self._bos_token or "", "eos_token": self._eos_token or ""}
        options = {"add_generation_prompt": add_generation_prompt, "tools": None, **variables}
        return render(self._template, messages, **names, **options)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD.

        Ids without a token (the padding of an embedding) decode to nothing.

        Args:
          ids: token ids.
          special: write special tokens out instead of leaving them out.

        Raises:
          RequestError: an id is negative.
        """
        stream = self.stream(special=special)
        return "".join(map(stream.push, ids)) + stream.finish()

    def stream(self, *, special: bool = False) -> "Detokenizer":
        """Returns a decoder that takes the ids of one answer as they come."""
        return Detokenizer(self, special=special)

    def token_bytes(self, index: int) -> bytes:
        """Returns the bytes that one id stands for, which need not be whole characters.

        Raises:
          RequestError: the id is negative.
        """
        if index < 0:
            raise RequestError(f"Token ids cannot be negative, got {index}.")
        return self._bytes(int(index))

    def save(self, folder: Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_settings.json`` for ``tokenizer_from_saved``."""
        self._core.save(str(folder / "tokenizer.json"))
        settings = {
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
            "add_bos": self.bos_id is not None,
            "stop_ids": sorted(self.stop_ids),
            "chat_template": self._chat_source,
        }
        path = folder / "tokenizer_settings.json"
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of a text whose special tokens are meant; ``mark`` is removed from the rest."""
        ids: list[int] = []
        start = 0
        for match in (*self._special_pattern.finditer(text), None):
            piece = text[start : match.start() if match else None]
            piece = piece.replace(mark, "") if mark else piece
            ids += self._core.encode(piece, add_special_tokens=False).ids
            if match:
                ids.append(self._special[match[0]])
                start = match.end()
        return ids

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._core.token_to_id(token)

    def _token_bytes(self, index: int) -> bytes:
        if index in self._added:
            return self._added[index]
        text = self._core.id_to_token(index)
        if text is None:
            return b""
        if not _BYTE_OF.keys() >= set(text):
            return text.encode()
        return bytes(_BYTE_OF[character] for character in text)


class Detokenizer:
    """Text of a growing answer: ``push`` ids as they come, ``finish`` at the end.

    A character whose bytes span several tokens is given out with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = frozenset() if special else tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index: int) -> str:
        """Returns the text that the id completes, possibly empty."""
        if index in self._skip:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(index))

    def finish(self) -> str:
        """Returns U+FFFD if the answer ended inside a character, else an empty string."""
        return self._utf8.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of GPT-2's byte-level BPE: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
