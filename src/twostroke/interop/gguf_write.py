"""Writes GGUF files, version 3: metadata, the table of tensors, and the tensors one after another as they are made.

Format: ggml's ``docs/gguf.md``. ``gguf`` reads what is written here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from twostroke.interop.gguf import MAGIC
from twostroke.model.published.gguf_types import TensorType

ALIGNMENT = 32
VERSION = 3

Value = bool | int | float | str | list[str] | np.ndarray
"""Of metadata. A whole number is written as uint32, another one as fp32, an array with the type that it has."""

_BOOL, _STRING, _ARRAY = 7, 8, 9
_ARRAYS = {"uint8": 0, "int8": 1, "uint32": 4, "int32": 5, "float32": 6, "bool": _BOOL, "uint64": 10, "int64": 11}


@dataclass(frozen=True)
class Stored:
    """A row of the tensor table. ``shape`` is in torch's order."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Of the tensor's blocks."""
        return math.prod(self.shape) // self.kind.n_values * self.kind.n_bytes


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", _ARRAY, _ARRAYS[value.dtype.name], len(value)) + value.tobytes()


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def write_header(stream: BinaryIO, metadata: Mapping[str, Value], tensors: Iterable[Stored]) -> int:
    """Write everything before the first tensor, which follows aligned. Returns the bytes of the whole file."""
    rows = list(tensors)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(rows), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    offset = 0
    for row in rows:
        dimensions = row.shape[::-1]
        parts += [_text(row.name), struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)]
        parts.append(struct.pack("<IQ", row.kind.number, offset))
        offset += _aligned(row.n_bytes)
    header = b"".join(parts)
    stream.write(header.ljust(_aligned(len(header)), b"\0"))
    return _aligned(len(header)) + offset


def write_tensor(stream: BinaryIO, row: Stored, raw: np.ndarray) -> None:
    """Write the bytes of ``row``, and what fills them up to the next tensor's place."""
    assert raw.nbytes == row.n_bytes, row
    stream.write(raw.data)
    stream.write(bytes(_aligned(row.n_bytes) - row.n_bytes))
