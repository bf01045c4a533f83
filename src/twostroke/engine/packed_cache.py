"""Keeps a model's packed matrices in a file, so that the next start reads them instead of converting every weight again.

``$TWOSTROKE_HOME/packed/<key>.bin`` is a header, then each matrix as the native library holds it. The folder belongs to this
user alone and lies outside of the model directory, which may come from a stranger. The key is a hash of what decides the bytes:
which files the weights are in (path, inode, size, times), how weights and head are held, and the library's sources.

A file is checked before it is used: its header has a digest, each matrix has a sum, and a matrix must have the format and shape
that the model needs next. A matrix that fails is packed from the weights again, and the file is written anew.

Engines that share a machine map the file instead of reading it, so that they hold one copy of the matrices together. The first,
which packs them, gives up its own for the file's. Nobody writes to a file that has its name, and one that is removed stays
until the last of them ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import re
import secrets
import shutil
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ConfigError
from twostroke.core.heap import return_freed_memory
from twostroke.core.paths import packed_dir
from twostroke.core.policy import LEAST_KEPT_PACKED_BYTES
from twostroke.core.private_folder import PrivateFolder, private_folder
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import NativeMatrix

MAX_FILES = 16
MAX_BYTES = 64 * 2**30
"""Limits of all files together; they take at most a quarter of the disk as well. The least recently used are removed first."""

RETURN_EVERY = 2**24
"""After so many packed weights, the memory that packing has freed goes back to the system."""

_FILE = re.compile(r"[0-9a-f]{32}\.bin")
_PARTIAL = re.compile(r"[0-9a-f]{32}\.([0-9]+)\.[0-9a-f]{16}\.partial")

_MAGIC = b"twostroke pack 2"
_START = struct.Struct("<16sQ32s")  # magic; bytes before the first matrix; digest of those bytes without itself
_ALIGNMENT = 4096
_LINE = 64
"""Each matrix begins at a multiple of it, in the file as in memory."""
_MAX_HEADER_BYTES = 2**24


@dataclass(frozen=True)
class Due:
    """What a matrix must be. ``group`` is how many inputs share a scale; 0 if the format has no groups."""

    format: str
    group: int
    n: int
    k: int

    @classmethod
    def of(cls, made: NativeMatrix) -> Due:
        return cls(made.format, made.group, made.n_rows, made.n_columns)


@dataclass(frozen=True)
class Entry:
    """One matrix in the file. ``total`` is the sum of its bytes as 64-bit words, modulo 2⁶⁴: any one changed bit changes it."""

    due: Due
    bytes: int
    total: int


def cache_key(directory: Path, *choices: str) -> str | None:
    """A name for what would be packed; None without the native library, or if a file cannot be looked at.

    It contains each file's inode and change time. Names, sizes and times of modification come out of an archive, so two models
    can agree in all of those.
    """
    loaded = library()
    if loaded is None:
        return None
    try:
        files = sorted(f for f in directory.iterdir() if f.suffix in (".safetensors", ".json"))
        parts = [loaded.ts_sources().decode(), str(directory.resolve()), *choices, *states_of_files(files)]
    except OSError:
        return None
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def states_of_files(files: Iterable[Path]) -> list[str]:
    """What changes whenever one of ``files`` is written: names, inodes, sizes, times. Raises OSError."""
    parts: list[str] = []
    for file in files:
        status = file.stat()
        parts += [file.name, *map(str, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))]
    return parts


class PackedCache:
    """The matrices of one plan, in the order of lowering: read from a file, or else collected to be written to one.

    ``matrix(pack, due)`` returns the next one. From the first thing that is wrong with the file, ``pack`` makes them. If
    ``shared``, they are those of a mapping of the file.
    """

    def __init__(self, key: str | None, shared: bool = False) -> None:
        self.key = key
        self._shared = shared
        self._mapped: npt.NDArray[np.uint8] | None = None
        self._at = 0
        self._made: list[NativeMatrix] = []
        self._n_packed = 0
        self._entries: list[Entry] = []
        self._stream: FileIO | None = None
        if key is not None:
            with contextlib.suppress(OSError, ValueError, ConfigError), private_folder(packed_dir()) as folder:
                stream = folder.read(f"{key}.bin")
                try:
                    self._entries = _read_header(stream, key)
                    self._at = stream.tell()
                    if shared:
                        self._mapped = _mapped(stream)
                    with contextlib.suppress(OSError):
                        os.utime(stream.fileno())  # the files used last stay
                except BaseException:
                    stream.close()
                    raise
                self._stream = stream

    @property
    def is_read(self) -> bool:
        """Whether matrices come from the file."""
        return self._stream is not None

    def matrix(self, pack: Callable[[], NativeMatrix], due: Due, bias: Any = None) -> NativeMatrix:
        """The file's next matrix if it is as ``due`` says, else what ``pack`` makes."""
        if self._stream is not None:
            try:
                made = self._read(self._stream, due, bias)
            except (OSError, ValueError):  # the file cannot be trusted from here on
                self._stream.close()
                self._stream = None
                made = pack()
        else:
            made = pack()
        assert Due.of(made) == due, f"{Due.of(made)} was packed and {due} is due"
        self._made.append(made)
        if self._stream is None:
            self._n_packed += made.n_rows * made.n_columns
            if self._n_packed >= RETURN_EVERY:
                self._n_packed = 0
                return_freed_memory()
        return made

    def _read(self, stream: FileIO, due: Due, bias: Any) -> NativeMatrix:
        if len(self._made) == len(self._entries) or self._entries[len(self._made)].due != due:
            raise ValueError("another matrix")
        entry, at = self._entries[len(self._made)], self._at
        self._at += _padded(entry.bytes)
        if self._mapped is not None:
            return self._placed(self._mapped[at : at + entry.bytes], entry, bias)
        made = NativeMatrix.empty(due.format, due.group, due.n, due.k, bias)
        if made.packed_bytes != entry.bytes:
            raise ValueError("another layout")
        target = _memory(made)
        read = 0
        while read < entry.bytes:  # the system gives 2 GiB at most at once
            n = stream.readinto(target[read:].data)
            if not n:
                raise ValueError("truncated")
            read += n
        behind = _padded(entry.bytes) - entry.bytes
        if len(stream.read(behind) if behind else b"") != behind:
            raise ValueError("truncated")
        if _total(target) != entry.total:
            raise ValueError("the file was altered")
        return made

    def _placed(self, data: npt.NDArray[np.uint8], entry: Entry, bias: Any) -> NativeMatrix:
        due = entry.due
        made = NativeMatrix.at(data.ctypes.data, data, due.format, due.group, due.n, due.k, bias)
        if made.packed_bytes != entry.bytes:
            raise ValueError("another layout")
        if _total(data) != entry.total:
            raise ValueError("the file was altered")
        return made

    def finish(self) -> threading.Thread | None:
        """Called after the last matrix. Writes the matrices in the background if they were packed and are worth a file. If they
        are shared it waits for that, and takes those of the file.

        A process that ends before that waits for the thread, so a short run leaves the file as well.
        """
        was_read = self._stream is not None
        if self._stream is not None:
            self._stream.close()
        else:
            return_freed_memory()
        made, self._made = self._made, []
        if was_read or self.key is None or sum(m.packed_bytes for m in made) < LEAST_KEPT_PACKED_BYTES:
            return None
        if self._shared:
            _write(self.key, made)
            _take_from_file(self.key, made)
            return None
        thread = threading.Thread(target=_write, args=(self.key, made), name="packed-weights")
        thread.start()
        return thread


def _take_from_file(key: str, matrices: list[NativeMatrix]) -> None:
    """Let ``matrices`` be those of the file that was just written of them. What is wrong with it leaves them as they are."""
    with contextlib.suppress(OSError, ValueError, ConfigError), private_folder(packed_dir()) as folder:
        with folder.read(f"{key}.bin") as stream:
            entries, at = _read_header(stream, key), stream.tell()
            data = _mapped(stream)
        if [entry.due for entry in entries] != [Due.of(matrix) for matrix in matrices]:
            raise ValueError("other matrices")
        for entry, matrix in zip(entries, matrices, strict=True):
            place = data[at : at + entry.bytes]
            at += _padded(entry.bytes)
            if entry.bytes != matrix.packed_bytes or _total(place) != entry.total:
                raise ValueError("the file was altered")
            matrix.move(place.ctypes.data, place)
    return_freed_memory()


def _mapped(stream: FileIO) -> npt.NDArray[np.uint8]:
    """The whole file, in memory that all who map it share. Raises OSError, and ValueError for an empty file."""
    return np.frombuffer(mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _LINE) * _LINE


def _memory(matrix: NativeMatrix) -> npt.NDArray[np.uint8]:
    buffer = (ctypes.c_uint8 * matrix.packed_bytes).from_address(matrix.address)
    return np.frombuffer(memoryview(buffer), dtype=np.uint8)


def _total(data: npt.NDArray[np.uint8]) -> int:
    """The sum of all 64-bit words, and of the last bytes singly. It reads 10 GB/s, where a cryptographic hash reads 1."""
    whole = len(data) // 8 * 8
    return (int(data[:whole].view(np.uint64).sum(dtype=np.uint64)) + int(data[whole:].sum(dtype=np.uint64))) % 2**64


def _digest(key: str, size: int, table: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<16sQ", _MAGIC, size) + table, digest_size=32, key=key.encode()).digest()


def _header(key: str, entries: list[Entry]) -> bytes:
    """Everything before the first matrix. Raises ValueError for more matrices than a header may name."""
    table = json.dumps([[*astuple(entry.due), entry.bytes, entry.total] for entry in entries]).encode()
    size = -(-(_START.size + len(table)) // _ALIGNMENT) * _ALIGNMENT
    if size > _MAX_HEADER_BYTES:
        raise ValueError("too many matrices")
    table = table.ljust(size - _START.size)
    return _START.pack(_MAGIC, size, _digest(key, size, table)) + table


def _read_header(stream: FileIO, key: str) -> list[Entry]:
    """The table of a file, which is then read up to its first matrix. Raises ValueError if ``_header`` did not write it."""
    start = stream.read(_START.size)
    if len(start) != _START.size:
        raise ValueError("truncated")
    magic, size, digest = _START.unpack(start)
    if magic != _MAGIC or not _START.size <= size <= _MAX_HEADER_BYTES:
        raise ValueError("not a file of packed matrices")
    table = stream.read(size - _START.size)
    if _digest(key, size, table) != digest:
        raise ValueError("the header was altered")
    try:
        entries = [Entry(Due(*row[:4]), *map(int, row[4:])) for row in json.loads(table)]
    except (TypeError, RecursionError) as error:
        raise ValueError("not a table of matrices") from error
    if os.fstat(stream.fileno()).st_size != size + sum(_padded(entry.bytes) for entry in entries):
        raise ValueError("truncated")
    return entries


def _write(key: str, matrices: list[NativeMatrix]) -> None:
    """Write the file. On a full disk, or in a home that may not be written, nothing happens: the next start packs again."""
    with contextlib.suppress(OSError, ValueError, ConfigError), private_folder(packed_dir(), create=True) as folder:
        entries = [Entry(Due.of(m), m.packed_bytes, _total(_memory(m))) for m in matrices]
        header = _header(key, entries)
        if not _make_room(folder, f"{key}.bin", len(header) + sum(_padded(entry.bytes) for entry in entries)):
            return
        partial = f"{key}.{os.getpid()}.{secrets.token_hex(8)}.partial"
        try:
            with folder.create(partial) as stream:
                stream.write(header)
                for matrix in matrices:
                    stream.write(_memory(matrix).data)
                    stream.write(bytes(_padded(matrix.packed_bytes) - matrix.packed_bytes))
            folder.rename(partial, f"{key}.bin")  # in one step: no reader sees half a file
        except BaseException:
            with contextlib.suppress(OSError):
                folder.remove(partial)
            raise


def _make_room(folder: PrivateFolder, name: str, needed: int) -> bool:
    """Whether a file of ``needed`` bytes may be written. Removes the least recently used files to make room.

    Files that a killed process left half written are removed as well, because one may be a gigabyte.
    """
    for partial, _ in folder.files(_PARTIAL):
        process = _PARTIAL.fullmatch(partial)
        if process is not None and not Path(f"/proc/{process[1]}").exists():
            folder.remove(partial)
    disk = shutil.disk_usage(folder.descriptor)
    most = min(MAX_BYTES, disk.total // 4)
    if needed > most:
        return False
    others = [(other, status.st_size) for other, status in folder.files(_FILE) if other != name]
    total = sum(size for _, size in others)
    while others and (len(others) >= MAX_FILES or total + needed > most):
        oldest, size = others.pop(0)  # ``files`` is in order of use, because a start touches the file that it reads
        folder.remove(oldest)
        total -= size
    # The file takes at most half of what is free.
    return shutil.disk_usage(folder.descriptor).free >= 2 * needed
