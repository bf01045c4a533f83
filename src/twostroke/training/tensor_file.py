"""Writes tensors to a safetensors file and hashes them in the same pass.

``safetensors.torch.save_file`` copies all tensors to bytes before it writes the first, and hashing the file then reads it
again. Here each piece is hashed while it is in the cache, and only one piece needs memory. ``model.safetensors_file`` describes
the format.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch import Tensor

from twostroke.model.safetensors_file import header_of, tensor_bytes
from twostroke.training.whole import rows_of_tensors

PIECE_BYTES = 1 << 20
"""A piece is hashed, then written. It is small enough to stay in a core's cache in between, and to release the GIL often."""


class HashedFile:
    """A new file as a context. ``n_bytes`` and ``sha256()`` are those of what was written to it, and at the end it is flushed
    to the disk. Raises OSError, also if the disk took only a part."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._hash = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._hash.update(piece)
            self.n_bytes += len(piece)
            while piece:  # the system may take less than it was given
                piece = piece[os.write(self._descriptor, piece) :]

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write_tensors(file: HashedFile, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` in the order of their names, whatever device they are on, one at a time."""
    described = rows_of_tensors(tensors)
    rows = {name: described[name] for name in sorted(described)}
    file.write(header_of(rows))
    for name in rows:
        file.write(tensor_bytes(tensors[name]))
