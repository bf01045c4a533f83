"""Codes of matrices that wait on disk until a model is written: a byte a weight, which may be more than memory has."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from twostroke.core.aside import naming
from twostroke.core.errors import TwostrokeError
from twostroke.kernels.codes import Codes
from twostroke.model.safetensors_file import tensor_bytes


class _Place(NamedTuple):
    """Where a tensor begins in the file, and what it is."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class KeptCodes(MutableMapping[str, Codes]):
    """Codes by name, in a file of ``folder`` without a name, which the system removes when the process ends, however it ends.
    Each reading makes a copy. A full disk is an OSError with the folder's name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".codes-")  # noqa: SIM115  # closed with this object
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[_Place, _Place, _Place | None]] = {}
        self._end = 0

    def __setitem__(self, name: str, codes: Codes) -> None:
        zero = None if codes.zero is None else self._written(codes.zero)
        self._places[name] = self._written(codes.codes), self._written(codes.scale), zero

    def __getitem__(self, name: str) -> Codes:
        codes, scale, zero = self._places[name]
        return Codes(self._read(codes), self._read(scale), None if zero is None else self._read(zero))

    def __delitem__(self, name: str) -> None:
        del self._places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _written(self, tensor: Tensor) -> _Place:
        place = _Place(self._end, tensor.dtype, tuple(tensor.shape))
        self._file.seek(self._end)
        with naming(self._folder):
            self._end += self._file.write(tensor_bytes(tensor))
        return place

    def _read(self, place: _Place) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        self._file.seek(place.at)
        if self._file.readinto(tensor_bytes(tensor)) != tensor.nbytes:
            raise TwostrokeError("codes that were kept on disk cannot be read again: the disk is damaged.")
        return tensor
