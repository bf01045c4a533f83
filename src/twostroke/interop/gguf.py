"""Reads GGUF files: metadata, tensor table and tensors. It checks every count and offset against the file before using it.

Format: ggml's ``docs/gguf.md``, versions 2 and 3; the types of tensors: ``gguf_types``.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.core.documents import Allowance
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.model.published.gguf_types import TYPES, TensorType, dequantise, type_of

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
MAX_KEY_BYTES = 65_535  # GGUF's own limit
MAX_TEXT_BYTES = 4 * 2**20  # the longest texts are chat templates
_FIELD_BYTES, _TENSOR_BYTES = 400, 1_100  # memory that a metadata field and a row of the tensor table take once they are read
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, number of dimensions, type, offset
_MIN_FIELD_BYTES = 8 + 4 + 1

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table. ``shape`` is in torch's order, the reverse of ggml's; ``data`` is the mapped file."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    data: mmap.mmap
    start: int
    n_bytes: int


class _Cursor:
    """Reads little-endian values in order, and never past the end of the file."""

    def __init__(self, file: Path, data: Any, allowance: Allowance) -> None:
        self.file, self.data, self.at, self.allowance = file, data, 0, allowance

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes > self.left:
            raise CorruptFileError(
                f"{self.file}: {what} needs {n_bytes} bytes, but only {self.left} are left. The file is truncated. Copy or "
                "download it again."
            )
        start, self.at = self.at, self.at + n_bytes
        return bytes(self.data[start : self.at])

    def scalar(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """Read a count of items of at least ``least_bytes`` each. They must fit into the rest of the file."""
        count: int = self.scalar("<Q", what)
        if count * least_bytes > self.left:
            raise CorruptFileError(f"{self.file}: {what} is {count}, more than the remaining {self.left} bytes can hold.")
        return count

    def string(self, what: str, most_bytes: int = MAX_TEXT_BYTES) -> str:
        length = self.count(f"the length of {what}", 1)
        if length > most_bytes:
            raise CorruptFileError(f"{self.file}: {what} has {length} bytes; at most {most_bytes} are read.")
        raw = self.take(length, what)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptFileError(
                f"{self.file}: {what} is not UTF-8: {raw[:40]!r}. The file is damaged; download it again."
            ) from None
        self.allowance.take(sys.getsizeof(text) + 8, what)
        return text

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise CorruptFileError(
                f"{self.file}: {what} has value type {kind}, which GGUF does not define. The file is damaged; download it "
                "again."
            )
        inner = self.scalar("<I", what)
        if inner not in _SCALARS and inner != _STRING:
            raise CorruptFileError(
                f"{self.file}: {what} is an array of value type {inner}; only arrays of numbers and of texts are read."
            )
        least = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 8
        count = self.count(f"the number of elements of {what}", least)
        if inner in _SCALARS:
            # A numpy array, because a list of a million Python numbers takes thirty times the file's bytes.
            return np.frombuffer(self.take(count * least, what), dtype=np.dtype(_SCALARS[inner]))
        return [self.string(what) for _ in range(count)]


class GgufFile:
    """An opened GGUF file with ``metadata`` (arrays of numbers are numpy arrays) and ``tensors``. ``read`` dequantises a
    tensor.

    Raises InputError if the file does not exist, CorruptFileError if it breaks the format.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"{self.path} does not exist. Name a GGUF file.")
        if self.path.stat().st_size < 24:
            raise CorruptFileError(f"{self.path} is {self.path.stat().st_size} bytes; a GGUF file has a header of 24.")
        with self.path.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.allowance = Allowance(self.path, len(self._data))
        cursor = _Cursor(self.path, self._data, self.allowance)
        if cursor.take(4, "the magic") != MAGIC:
            raise CorruptFileError(f"{self.path} does not begin with {MAGIC!r}: it is not a GGUF file.")
        version = cursor.scalar("<I", "the version")
        if version & 0xFFFF == 0:
            raise CorruptFileError(f"{self.path} is a big-endian GGUF file; only little-endian ones are read.")
        if version not in (2, 3):
            raise CorruptFileError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read.")
        n_tensors = cursor.count("the number of tensors", _MIN_TENSOR_BYTES)
        n_fields = cursor.count("the number of metadata fields", _MIN_FIELD_BYTES)
        self.allowance.take(n_fields * _FIELD_BYTES + n_tensors * _TENSOR_BYTES, "its tables of metadata and tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_fields):
            key = cursor.string("a metadata key", MAX_KEY_BYTES)
            if key in self.metadata:
                raise CorruptFileError(f"{self.path}: metadata key {key!r:.80} occurs twice.")
            self.metadata[key] = cursor.value(cursor.scalar("<I", f"the type of {key!r:.80}"), f"metadata {key!r:.80}")
        self.tensors = self._read_table(cursor, n_tensors)

    def _read_table(self, cursor: _Cursor, n_tensors: int) -> dict[str, GgufTensor]:
        rows: list[tuple[str, TensorType, tuple[int, ...], int, int]] = []
        for _ in range(n_tensors):
            name = cursor.string("a tensor name", MAX_KEY_BYTES)
            n_dimensions = cursor.scalar("<I", f"tensor {name!r:.80}")
            if not 1 <= n_dimensions <= MAX_DIMENSIONS:
                raise CorruptFileError(
                    f"{self.path}: tensor {name!r:.80} has {n_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are legal."
                )
            shape = tuple(cursor.scalar("<Q", f"tensor {name!r:.80}") for _ in range(n_dimensions))[::-1]
            type_number = cursor.scalar("<I", f"tensor {name!r:.80}")
            offset = cursor.scalar("<Q", f"tensor {name!r:.80}")
            kind = type_of(type_number)
            if isinstance(kind, str):
                raise ConfigError(
                    f"{self.path}: tensor {name!r:.80} is {kind}, which is not read. Read: {', '.join(TYPES)}. "
                    "Convert the file to one of them, for example with llama.cpp's llama-quantize."
                )
            if math.prod(shape) == 0 or shape[-1] % kind.n_values:
                raise CorruptFileError(
                    f"{self.path}: tensor {name!r:.80} of {kind.name} has shape {list(shape)}; "
                    f"rows must be whole blocks of {kind.n_values}."
                )
            rows.append((name, kind, shape, offset, math.prod(shape) // kind.n_values * kind.n_bytes))
        alignment = self.metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise CorruptFileError(f"{self.path}: general.alignment={alignment!r:.50} must be from 1 to {MAX_ALIGNMENT}.")
        data_start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, kind, shape, offset, n_bytes in sorted(rows, key=lambda row: row[3]):
            if name in tensors:
                raise CorruptFileError(f"{self.path}: tensor {name!r:.80} occurs twice.")
            if offset % alignment or offset < end:
                raise CorruptFileError(
                    f"{self.path}: tensor {name!r:.80} at offset {offset} is misaligned or overlaps the one before. The file "
                    "is damaged; download it again."
                )
            end = offset + n_bytes
            if data_start + end > len(self._data):
                raise CorruptFileError(
                    f"{self.path} is {len(self._data)} bytes, but tensor {name!r:.80} ends at {data_start + end}. "
                    "The file is truncated: copy or download it again."
                )
            tensors[name] = GgufTensor(name, kind, shape, self._data, data_start + offset, n_bytes)
        return tensors

    def raw(self, name: str) -> np.ndarray:
        """The bytes of the tensor ``name``, mapped from the file."""
        info = self.tensors[name]
        return np.frombuffer(info.data, dtype=np.uint8, count=info.n_bytes, offset=info.start)

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor ``name``. F32, F16 and BF16 are read as they are; quantised types as the numbers that they stand for,
        exact in fp32 or rounded to bf16 (``dtype``)."""
        info, raw = self.tensors[name], self.raw(name)
        if info.kind.dtype is not None:
            return torch.from_numpy(raw.copy()).view(info.kind.dtype).view(info.shape)
        return dequantise(info.kind, raw, dtype).view(info.shape)
