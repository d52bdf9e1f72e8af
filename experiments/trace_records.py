"""One recorded request in a neutral form, its token ids, and the checks that readers share.

Traces hold no text: a prompt is a sequence of blocks, and blocks with equal identities hold equal
tokens. ``prompt_tokens`` turns a record into token ids, the same ones in every process.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvgrain_jax.errors import ConfigError


class TraceError(ConfigError):
    """A trace file is missing, empty, of no known format, or wrong on the line that is named."""


class Blocks(NamedTuple):
    """``length`` consecutive blocks with identities ``(space, first)``, ``(space, first + 1)``, …

    Blocks of different spaces never hold equal tokens on purpose.
    """

    space: str
    first: int
    length: int


@dataclasses.dataclass(frozen=True)
class TraceRecord:
    """One recorded request.

    Attributes:
      id: name, unique in the trace.
      arrival: seconds after the first request of the trace.
      input_tokens: length of the prompt.
      output_tokens: length of the answer; 0 where the client hung up.
      block_size: tokens of a block.
      blocks: runs of blocks that make up the prompt, ``ceil(input_tokens / block_size)`` blocks in
        all; of the last one only the leading tokens may be used.
      shared_blocks: leading blocks that the trace itself declares common to other requests.
    """

    id: str
    arrival: float
    input_tokens: int
    output_tokens: int
    block_size: int
    blocks: tuple[Blocks, ...]
    shared_blocks: int = 0


def prompt_tokens(
    record: TraceRecord,
    vocabulary: int,
    block_tokens: int | None = None,
    limit: int | None = None,
) -> np.ndarray:
    """Token ids of a record's prompt; equal leading blocks give equal leading tokens.

    Args:
      record: the record.
      vocabulary: ids are drawn from ``[0, vocabulary)``.
      block_tokens: tokens that a block is scaled to; None keeps ``record.block_size``. A partly
        used last block shrinks in proportion, to one token at least.
      limit: leading tokens to return at most; None returns all.

    Returns:
      int32 ``[min(limit, scaled_length(record, block_tokens))]``.
    """
    size = block_tokens or record.block_size
    missing = scaled_length(record, size)
    missing = missing if limit is None else min(missing, limit)
    parts = []
    for blocks in record.blocks:
        count = min(missing, blocks.length * size)
        parts.append(synthetic_tokens(blocks.space, blocks.first * size, count, vocabulary))
        missing -= count
    return np.concatenate(parts)


def scaled_length(record: TraceRecord, block_tokens: int) -> int:
    """Length of the prompt when every block is scaled to ``block_tokens`` tokens."""
    full, rest = divmod(record.input_tokens, record.block_size)
    return full * block_tokens + math.ceil(rest * block_tokens / record.block_size)


def synthetic_tokens(space: str, start: int, count: int, vocabulary: int) -> np.ndarray:
    """Tokens ``start … start + count`` of the endless random text named ``space``.

    Any piece can be had without the pieces before it, and is the same in every process.

    Returns:
      int32 ``[count]``, ids in ``[0, vocabulary)``.
    """
    seed = int.from_bytes(hashlib.blake2b(space.encode(), digest_size=8).digest(), "little")
    return (splitmix64(seed, start, count) % np.uint64(vocabulary)).astype(np.int32)


def splitmix64(seed: int, start: int, count: int) -> np.ndarray:
    """Outputs ``start … start + count`` of the SplitMix64 generator (Steele, Lea, Flood, 2014).

    Returns:
      uint64 ``[count]``.
    """
    index = np.uint64((start + 1) % 2**64) + np.arange(count, dtype=np.uint64)
    z = np.uint64(seed) + index * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def whole(data: dict[str, Any], key: str, where: str, minimum: int = 0) -> int:
    """``data[key]``, checked to be a whole number ``>= minimum``, or ``TraceError``."""
    value = _present(data, key, where)
    if type(value) is not int or value < minimum:
        raise TraceError(f"{where}: {key!r} is {value!r}, not a whole number >= {minimum}.")
    return value


def seconds(data: dict[str, Any], key: str, where: str) -> float:
    """``data[key]``, checked to be a finite number ``>= 0``, or ``TraceError``."""
    value = _present(data, key, where)
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise TraceError(f"{where}: {key!r} is {value!r}, not a number >= 0.")
    return float(value)


def _present(data: dict[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise TraceError(f"{where}: {key!r} is missing; there is {', '.join(data) or 'nothing'}.")
    return data[key]


def runs_of(ids: Iterable[int], space: str) -> tuple[Blocks, ...]:
    """Joins consecutive block ids into runs."""
    runs: list[Blocks] = []
    for block in ids:
        if runs and runs[-1].first + runs[-1].length == block:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(Blocks(space, block, 1))
    return tuple(runs)


def json_lines(path: pathlib.Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a JSON-lines text, each with its ``path:line`` for messages."""
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        where = f"{path}:{line}"
        try:
            data = json.loads(content)
        except ValueError as error:
            raise TraceError(f"{where}: not valid JSON ({error}).") from error
        if not isinstance(data, dict):
            raise TraceError(f"{where}: a JSON object is expected, not {type(data).__name__}.")
        yield where, data


def block_ids(value: Any, where: str, key: str = "hash_ids") -> Sequence[int]:
    """A list of block ids, checked."""
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        raise TraceError(f"{where}: {key!r} is not a list of whole numbers >= 0.")
    return value
