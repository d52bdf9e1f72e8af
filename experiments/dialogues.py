"""Dialogues of a tool-using assistant as tau-bench records them (trace format ``dialogues``).

What enters is the text of a file, JSON: a list of objects with ``traj``, a list of messages (``role``,
``content``, ``tool_calls``). What leaves are ``TraceRecord``: every message of the assistant is one
request, whose prompt is all messages before it. Messages with equal content hold equal tokens, so the
system prompt is shared by all dialogues and a dialogue shares its own history.
"""

import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.trace_records import Blocks, TraceError, TraceRecord

# The system prompt of tau-bench's airline domain: 6,155 characters, 1,338 tokens.
CHARACTERS_PER_TOKEN = 4.6
TURN_GAP_S = 5.0


def read_dialogues(
    path: pathlib.Path, text: str, *, dialogue_gap: float = 0.0
) -> Iterator[TraceRecord]:
    """Requests of all dialogues of a file, whose blocks are single tokens.

    The file holds no times: dialogue ``i`` starts at ``i * dialogue_gap`` seconds, and its requests
    follow each other every ``TURN_GAP_S``. Lengths are estimated from characters.

    Args:
      path: for messages.
      text: content of the file.
      dialogue_gap: seconds between the starts of dialogues.

    Raises:
      TraceError: a dialogue is malformed.
    """
    try:
        for index, dialogue in enumerate(json.loads(text)):
            yield from _requests(dialogue["traj"], f"d{index}", index * dialogue_gap)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} holds no dialogues in tau-bench's form ({error!r}).") from error


def _requests(messages: Sequence[dict[str, Any]], name: str, start: float) -> list[TraceRecord]:
    texts = [_text(message) for message in messages]
    blocks = [Blocks(f"dialogue/{_digest(text)}", 0, _tokens(text)) for text in texts]
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    return [
        TraceRecord(
            id=f"{name}/{turn}",
            arrival=start + turn * TURN_GAP_S,
            input_tokens=sum(block.length for block in blocks[:index]),
            output_tokens=blocks[index].length,
            block_size=1,
            blocks=tuple(blocks[:index]),
            shared_blocks=sum(block.length for block in blocks[: len(system)]),
        )
        for turn, index in enumerate(answers)
    ]


def _text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return f"{message['role']}\n{message.get('content') or ''}{json.dumps(calls) if calls else ''}"


def _tokens(text: str) -> int:
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
