"""Reads the GGUF container: a path enters; metadata and tensors, checked against the file, leave.

The format (github.com/ggml-org/ggml, ``docs/gguf.md``): magic, version, counts, key-value metadata,
tensor descriptions, then aligned tensor data. The header is parsed here and not with the ``gguf``
package because every length must be held against the file's end before it is believed, and because
one NumPy view for each string takes seconds; dequantisation is the package's.
"""

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models.errors import CheckpointError

# Value type codes of the format: struct letters of the scalars, then string and array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_RANK = 4


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies in the file.

    Attributes:
      shape: as NumPy has it, outermost first (the file has it reversed).
      kind: quantisation.
      start: first byte in the file.
      n_bytes: length in the file.
    """

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    n_bytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A parsed GGUF file.

    Attributes:
      path: the file.
      metadata: key to number, bool, string or list.
      tensors: name to description.
      data: the mapped file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    def get(self, key: str, *kinds: type) -> Any:
        """Returns one metadata value.

        Raises:
          CheckpointError: the key is missing or its value is of none of ``kinds``.
        """
        if key not in self.metadata:
            raise CheckpointError(
                f"{self.path}: the metadata has no {key!r}; is the file complete?"
            )
        value = self.metadata[key]
        if not isinstance(value, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(
                f"{self.path}: metadata {key!r} must be {names}, got {value!r:.60}."
            )
        return value

    def dequantise(self, name: str) -> np.ndarray:
        """Returns a tensor as float32 in its NumPy shape, row-major ``[out, in]`` for a matrix.

        Raises:
          CheckpointError: there is no such tensor, or its quantisation cannot be read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing.")
        tensor = self.tensors[name]
        raw = np.frombuffer(self.data, np.uint8, tensor.n_bytes, tensor.start)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            # Damaged scales overflow; what comes out is checked to be finite where it is used.
            with np.errstate(all="ignore"):
                values = gguf.dequantize(rows, tensor.kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {tensor.kind.name}, which the gguf package cannot "
                "dequantise; use a file with another quantisation."
            ) from error
        return values.reshape(tensor.shape).astype(np.float32, copy=False)


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Parses the header of a GGUF file and maps its data.

    Raises:
      CheckpointError: the file cannot be opened, is no GGUF file, is cut short, or is corrupt.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file, its first bytes are {data[:4]!r}.")
    cursor.at = 4
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version} cannot be read, only 2 and 3.")
    n_tensors = cursor.count(24, "the number of tensors")
    n_keys = cursor.count(12, "the number of metadata keys")
    metadata = {}
    for _ in range(n_keys):
        key = cursor.string("a metadata key")
        metadata[key] = cursor.value(cursor.scalar("I", key), key)
    descriptions = [_description(cursor) for _ in range(n_tensors)]

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment {alignment!r} is not a power of two.")
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, tensor in descriptions:
        placed = dataclasses.replace(tensor, start=base + tensor.start)
        end = placed.start + placed.n_bytes
        if end > len(data):
            raise CheckpointError(
                f"{path}: cut short: tensor {name!r} ends at byte {end}, the file at {len(data)}."
            )
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name!r} is described twice.")
        tensors[name] = placed
    return GGUFFile(path, metadata, tensors, data)


def _description(cursor: "_Cursor") -> tuple[str, GGUFTensor]:
    name = cursor.string("a tensor name")
    rank = cursor.scalar("I", name)
    if not 1 <= rank <= _MAX_RANK:
        raise CheckpointError(f"{cursor.path}: corrupt: tensor {name!r} has {rank} dimensions.")
    shape = tuple(cursor.scalar("Q", name) for _ in range(rank))[::-1]
    code, offset = cursor.scalar("I", name), cursor.scalar("Q", name)
    try:
        kind = gguf.GGMLQuantizationType(code)
    except ValueError as error:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} has quantisation code {code}, which is not known."
        ) from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(
            f"{cursor.path}: corrupt: tensor {name!r} of shape {shape} cannot be {kind.name}."
        )
    return name, GGUFTensor(shape, kind, offset, math.prod(shape) // block * block_bytes)


class _Cursor:
    """Reads values one after the other; nothing beyond the end of the file is believed."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, n_bytes: int, what: str) -> int:
        start = self.at
        if start + n_bytes > len(self.data):
            raise self.cut(start + n_bytes, what)
        self.at += n_bytes
        return start

    def cut(self, end: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: cut short or corrupt: {what} needs bytes up to {end}, the file ends at "
            f"{len(self.data)}."
        )

    def scalar(self, letter: str, what: str) -> Any:
        start = self.take(struct.calcsize("<" + letter), what)
        return struct.unpack_from("<" + letter, self.data, start)[0]

    def count(self, least_bytes: int, what: str) -> int:
        """A number of things of ``least_bytes`` each that are still to come."""
        number = self.scalar("Q", what)
        if number * least_bytes > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path}: cut short or corrupt: {what} is {number}, more than the "
                f"{len(self.data) - self.at} bytes after it can hold."
            )
        return number

    def string(self, what: str) -> str:
        length = self.count(1, f"the length of {what}")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: corrupt: {what} is not UTF-8.") from error

    def strings(self, what: str) -> list[str]:
        # A vocabulary has 10⁵ strings: no call for each of them.
        texts, at, end = [], self.at + 8, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(self.count(8, what)):
                start = at + 8
                at = start + unpack(self.data, at)[0] if start <= end else start
                if at > end:
                    raise self.cut(at, what)
                texts.append(self.data[start:at].decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: corrupt: {what} is not UTF-8.") from error
        self.at = at
        return texts

    def value(self, code: int, key: str) -> Any:
        if code == _STRING:
            return self.string(key)
        if code in _SCALARS:
            return self.scalar(_SCALARS[code], key)
        if code != _ARRAY:
            raise CheckpointError(f"{self.path}: corrupt: {key!r} has value type {code}.")
        inner = self.scalar("I", key)
        if inner == _STRING:
            return self.strings(key)
        if inner not in _SCALARS:
            raise CheckpointError(f"{self.path}: corrupt: {key!r} is an array of type {inner}.")
        number = self.count(struct.calcsize("<" + _SCALARS[inner]), key)
        layout = f"<{number}{_SCALARS[inner]}"
        return list(struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), key)))
