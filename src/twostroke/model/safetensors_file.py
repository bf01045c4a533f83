"""Reads safetensors files from any source. It checks every size against the file before it allocates anything.

Format (huggingface/safetensors, README "Format"): 8 bytes little-endian header length N, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, then the tensors' bytes, contiguous and without holes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from twostroke.core.documents import Allowance, parse_json, read_object
from twostroke.core.errors import CorruptFileError, InputError

MAX_HEADER_BYTES = 16_000_000  # enough for 100,000 tensors; the format's own limit of 100 MB takes a gigabyte once parsed
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 16_000_000
MAX_DIMENSIONS = 16
MAX_COUNT = 2**63 - 1
MAPPED_BYTES = 2**25

_ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

TAGS = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    torch.uint32: "U32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


def header_of(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], made_by: str | None = None) -> bytes:
    """What comes before the bytes of ``tensors``, which follow in this order. transformers refuses a file that does not say
    what ``made_by`` says."""
    header: dict[str, Any] = {} if made_by is None else {"__metadata__": {"format": made_by}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned when the file is mapped
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor`` in row-major order, without a copy if it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True)
class TensorInfo:
    """The header's entry of one tensor. ``dtype`` is the format's name, such as ``BF16``."""

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def read_header(file: Path, allowance: Allowance | None = None) -> dict[str, TensorInfo]:
    """The header of ``file``: its tensors by name. ``allowance`` limits the memory, by default to that for a single file.
    Raises InputError if the file does not exist, CorruptFileError if it breaks the format or its header needs too much
    memory."""
    if not file.is_file():
        raise InputError(f"{file} does not exist. Name a model directory with its weights.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CorruptFileError(
                f"{file} is {size} bytes; a safetensors file has a header of at least 8. Copy or download it again."
            )
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise CorruptFileError(
                f"{file} declares a header of {length} bytes, but {size - 8} bytes follow, and at most {MAX_HEADER_BYTES} are "
                "read. It is truncated or not a safetensors file. Copy or download it again."
            )
        raw = stream.read(length)
    header = parse_json(raw, f"{file}: the safetensors header", allowance or Allowance(file, size))
    if not isinstance(header, dict):
        raise CorruptFileError(f"{file}: the safetensors header must be a JSON object.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptFileError(f"{file}: the header's __metadata__ must be an object of texts, found {metadata!r:.100}.")
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        info, begin, end = _read_entry(file, name, entry)
        tensors[name] = info
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise CorruptFileError(
                f"{file}: tensor {name!r:.80} begins at byte {begin} and should begin at {position}: a hole or an overlap. "
                "Copy or download it again."
            )
        position = end
    if 8 + length + position != size:
        raise CorruptFileError(
            f"{file} is {size} bytes, but its header describes {8 + length + position}. It is truncated or padded: "
            "copy or download it again."
        )
    return tensors


def _read_entry(file: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    is_shape = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(map(_is_count, shape))
    if not isinstance(shape, list) or not is_shape or not isinstance(offsets, list) or len(offsets) != 2:
        raise CorruptFileError(
            f"{file}: tensor {name!r:.80} needs a shape of whole numbers, at most {MAX_DIMENSIONS}, and two data_offsets, "
            f"found {entry!r:.200}."
        )
    begin, end = offsets
    if not _is_count(begin) or not _is_count(end) or end < begin:
        raise CorruptFileError(f"{file}: tensor {name!r:.80} has impossible data_offsets {offsets!r:.100}.")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _ELEMENT_BYTES:
        raise CorruptFileError(
            f"{file}: tensor {name!r:.80} has dtype {dtype!r:.50}, which is not one of {', '.join(_ELEMENT_BYTES)}."
        )
    needed = math.prod(shape) * _ELEMENT_BYTES[dtype]
    if end - begin != needed:
        raise CorruptFileError(
            f"{file}: tensor {name!r:.80} of {dtype} {shape} needs {needed} bytes, but its offsets span {end - begin}."
        )
    return TensorInfo(dtype, tuple(shape), needed), begin, end


class WeightFiles:
    """The tensors of all weight files of a model directory. Only headers are read until ``get`` is called.

    Raises InputError if the directory has no weights, CorruptFileError if index, header and file disagree.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.infos: dict[str, TensorInfo] = {}
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, tuple[Any, int]] = {}  # open mappings, each with the bytes of the tensors taken from it
        files = _weight_files(self.directory)
        allowance = Allowance(self.directory, sum(file.stat().st_size for file in files))
        for file in files:
            for name, info in read_header(file, allowance).items():
                if name in self.infos:
                    raise CorruptFileError(
                        f"tensor {name!r:.80} is in both {self._file_of[name].name} and {file.name} of {directory}."
                    )
                self.infos[name] = info
                self._file_of[name] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __contains__(self, name: str) -> bool:
        return name in self.infos

    def get(self, name: str) -> Tensor:
        """The tensor ``name``, memory-mapped from its file.

        Pages that were read of a mapping count as this process's memory until the last tensor of the mapping is freed. So
        tensors share a mapping only up to ``MAPPED_BYTES``. Packing a model then needs little more memory than the packed
        weights, and an embedding table that stays mapped keeps nothing else in memory."""
        file, n_bytes = self._file_of[name], self.infos[name].n_bytes
        opened, taken = self._open.pop(file, (None, 0))
        if opened is None or taken + n_bytes > MAPPED_BYTES:
            try:
                opened, taken = safetensors.safe_open(str(file), framework="pt"), 0
            except (safetensors.SafetensorError, OSError) as error:
                raise CorruptFileError(f"{file} cannot be read as safetensors: {error}.") from None
        if n_bytes <= MAPPED_BYTES:
            self._open[file] = (opened, taken + n_bytes)
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise InputError(f"model directory {directory} does not exist. Name one with config.json and weights.")
    index = directory / INDEX_NAME
    if not index.is_file():
        single = directory / SINGLE_NAME
        if single.is_file():
            return [single]
        pickled = sorted(p.name for p in directory.glob("*.bin"))
        hint = f" {pickled[0]} may be a pickle, which is never opened. Convert it to safetensors." if pickled else ""
        raise InputError(f"{directory} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}.{hint}")
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptFileError(f"{index} must be JSON with a weight_map of tensor names to file names.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptFileError(
                f"{index} names the file {name!r:.200}; only a .safetensors file beside the index may be named."
            )
        if not (directory / name).is_file():
            raise CorruptFileError(f"{index} names {name}, which is not there. Copy or download it as well.")
    return [directory / name for name in names]
