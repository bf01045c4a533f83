"""Packed matrices of a model, kept in a file beside it: what a start reads instead of converting every weight again.

``<model>/.packed/<key>.bin`` is a JSON header of a fixed length, then each matrix as the native library holds it. The key is a
hash of what decides the bytes: the model's weight files (names, sizes, times of change), how weights and head are held, and the
library's sources. A file is written aside and renamed; every matrix carries a sum that is checked when it is read, and a file
that is not as it was written is made anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.engine.memory import return_freed_memory
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import NativeMatrix

FOLDER = ".packed"
LEAST_BYTES = 32 * 2**20
"""A smaller model is packed faster than it is worth a file."""

RETURN_EVERY = 2**24
"""Packed weights after which what packing them has freed goes back to the system."""

_HEADER_BYTES = 2**20
_KEPT = 4
"""Files that stay, the newest: one for each way to hold the weights that is in use."""


@dataclass(frozen=True)
class Entry:
    """One matrix in the file. ``total`` is the sum of its bytes as 64-bit words, modulo 2⁶⁴: any one changed bit changes it."""

    format: str
    group: int
    n: int
    k: int
    offset: int
    bytes: int
    total: int


def cache_key(directory: Path, *choices: str) -> str | None:
    """Names what would be packed; None where there is no native library or a file cannot be looked at."""
    loaded = library()
    if loaded is None:
        return None
    parts = [loaded.ts_sources().decode(), *choices]
    try:
        for file in sorted(f for f in directory.iterdir() if f.suffix in (".safetensors", ".json")):
            status = file.stat()
            parts += [file.name, str(status.st_size), str(status.st_mtime_ns)]
    except OSError:
        return None
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class PackedCache:
    """The matrices of one plan in the order in which it is lowered: read where a file holds them, else collected to be written.

    ``matrix(pack)`` is the next one. Whatever is wrong with the file, ``pack`` is called from then on.
    """

    def __init__(self, directory: Path, key: str | None) -> None:
        self.path = None if key is None else directory / FOLDER / f"{key}.bin"
        self._made: list[NativeMatrix] = []
        self._n_packed = 0
        self._entries: list[Entry] = []
        self._stream: Any = None
        if self.path is not None and self.path.is_file():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                self._entries = _read_header(self.path)
                self._stream = self.path.open("rb", buffering=0)
                with contextlib.suppress(OSError):
                    os.utime(self.path)  # the newest files stay

    @property
    def is_read(self) -> bool:
        """Whether matrices come from the file."""
        return self._stream is not None

    def matrix(self, pack: Callable[[], NativeMatrix], bias: Any = None) -> NativeMatrix:
        if self._stream is not None:
            try:
                made = self._read(self._entries[len(self._made)], bias)
            except (OSError, ValueError, IndexError):
                self._stream.close()
                self._stream = None
                made = pack()
        else:
            made = pack()
        self._made.append(made)
        if self._stream is None:
            self._n_packed += made.n_rows * made.n_columns
            if self._n_packed >= RETURN_EVERY:
                self._n_packed = 0
                return_freed_memory()
        return made

    def _read(self, entry: Entry, bias: Any) -> NativeMatrix:
        made = NativeMatrix.empty(entry.format, entry.group, entry.n, entry.k, bias)
        if made.packed_bytes != entry.bytes:
            raise ValueError("another layout")
        target = _memory(made)
        self._stream.seek(entry.offset)
        if self._stream.readinto(target.data) != entry.bytes or _total(target) != entry.total:
            raise ValueError("the file was altered")
        return made

    def finish(self) -> threading.Thread | None:
        """All matrices are there: write them in the background where they did not come from a file and are worth it.

        A process that ends at once waits for it, so that short ones leave the file as well."""
        was_read = self._stream is not None
        if was_read:
            self._stream.close()
        else:
            return_freed_memory()
        made, self._made = self._made, []
        if was_read or self.path is None or sum(m.packed_bytes for m in made) < LEAST_BYTES:
            return None
        thread = threading.Thread(target=_write, args=(self.path, made), name="packed-weights")
        thread.start()
        return thread


def _memory(matrix: NativeMatrix) -> npt.NDArray[np.uint8]:
    buffer = (ctypes.c_uint8 * matrix.packed_bytes).from_address(matrix.address)
    return np.frombuffer(memoryview(buffer), dtype=np.uint8)


def _total(data: npt.NDArray[np.uint8]) -> int:
    whole = len(data) // 8 * 8
    return (int(data[:whole].view(np.uint64).sum(dtype=np.uint64)) + int(data[whole:].sum(dtype=np.uint64))) % 2**64


def _read_header(path: Path) -> list[Entry]:
    with path.open("rb") as stream:
        document = json.loads(stream.read(_HEADER_BYTES))
    entries = [Entry(**entry) for entry in document]
    if path.stat().st_size != entries[-1].offset + entries[-1].bytes:
        raise ValueError("truncated")
    return entries


def _remove_stale(folder: Path) -> None:
    """What a process left that was killed while it wrote: a gigabyte, perhaps."""
    for partial in folder.glob("*.partial"):
        process = partial.name.split(".")[-2]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            partial.unlink(missing_ok=True)


def _write(path: Path, matrices: list[NativeMatrix]) -> None:
    """A disk that is full, or a directory that may not be written, only means that the next start packs again."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    needed = _HEADER_BYTES + sum(m.packed_bytes for m in matrices)
    try:
        path.parent.mkdir(exist_ok=True)
        _remove_stale(path.parent)
        if shutil.disk_usage(path.parent).free < 2 * needed:
            return
        entries, offset = [], _HEADER_BYTES
        with partial.open("wb") as stream:
            stream.seek(_HEADER_BYTES)
            for matrix in matrices:
                data = _memory(matrix)
                stream.write(data.data)
                size = matrix.packed_bytes
                shape = (matrix.n_rows, matrix.n_columns, offset, size, _total(data))
                entries.append(Entry(matrix.format, matrix.group, *shape))
                offset += size
            header = json.dumps([vars(entry) for entry in entries]).encode()
            if len(header) > _HEADER_BYTES:
                raise ValueError("too many matrices")
            stream.seek(0)
            stream.write(header.ljust(_HEADER_BYTES))
        partial.replace(path)
        files = sorted(path.parent.glob("*.bin"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in files[_KEPT:]:
            old.unlink(missing_ok=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
