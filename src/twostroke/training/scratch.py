"""A scratch file: what a run keeps on disk instead of in memory, while it runs.

The file has no name, so the system removes it when its process ends, however it ends. All that is read is held against a sum
taken when it was written. Pieces are written and read by system calls: in mapped memory every page of 4 KiB faults, which took
two to nine times as long for 96 MB on a busy Zen 4, and a page that the disk cannot give ends the process, where a system call
says why. Mapped memory is for looking at the whole, as a checkpoint does.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.core.errors import ConfigError, TwostrokeError
from twostroke.core.train_settings import TrainSettings
from twostroke.core.units import format_bytes
from twostroke.model.safetensors_file import tensor_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ScratchError(TwostrokeError):
    """A scratch file cannot be written or read, or does not hold what was written. Checkpoints are not touched."""


def check_offload(settings: TrainSettings, device_type: str) -> None:
    """Raise ConfigError if ``settings`` keep anything on disk and the run does not train on a CPU of a system that can."""
    for key, place in (
        ("offload_optimizer", settings.offload_optimizer),
        ("offload_activations", settings.offload_activations),
    ):
        if place != "none" and device_type != "cpu":
            raise ConfigError(
                f'train.{key}="{place}" is for training on a CPU, and this run trains on {device_type}. Leave it out.'
            )
        if place != "none" and not hasattr(os, "posix_fallocate"):
            raise ConfigError(
                f'train.{key}="{place}" needs a system that reserves room on its disk, as Linux does. Leave it out.'
            )


class ScratchFile:
    """A file in ``folder`` for what recipe key ``key`` keeps there, which is ``content`` in words.

    ``written_bytes`` counts what was written, ``read_bytes`` what steps took of what was read.
    """

    def __init__(self, folder: Path, key: str, content: str) -> None:
        self._folder, self._key, self._content = folder, key, content
        self._sums: dict[int, tuple[int, int]] = {}  # offset → bytes of the piece there, and their sum
        self._size = 0
        self._map: mmap.mmap | None = None
        self.read_bytes = self.written_bytes = 0
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, prefix=".scratch-", buffering=0) as file:
                self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def reserve(self, n_bytes: int) -> int:
        """Take ``n_bytes`` of the disk, and return where they begin. Raises ScratchError if the disk has no room for them."""
        start, n_bytes = self._size, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if n_bytes:
            with self._explained(n_bytes):
                os.posix_fallocate(self.descriptor, start, n_bytes)
        self._size += n_bytes
        return start

    def write(self, offset: int, tensor: Tensor) -> None:
        """Write ``tensor`` as one piece at ``offset``."""
        data = tensor_bytes(tensor)
        self._sums[offset] = len(data), _sum(data)
        self.written_bytes += len(data)
        with self._explained(len(data)):
            while data:  # the system may take less than it was given
                n = os.pwrite(self.descriptor, data, offset)
                data, offset = data[n:], offset + n

    def read(self, offset: int, tensor: Tensor) -> None:
        """Fill ``tensor`` with the piece at ``offset``. Raises ScratchError if it is not what was written there."""
        whole = data = tensor_bytes(tensor)
        at = offset
        with self._explained():
            while data:
                n = os.preadv(self.descriptor, [data], at)
                if n == 0:
                    break
                data, at = data[n:], at + n
        self._check(offset, whole)

    def read_ahead(self, offset: int, n_bytes: int) -> None:
        """Ask the system to read these bytes into its memory soon."""
        os.posix_fadvise(self.descriptor, offset, n_bytes, os.POSIX_FADV_WILLNEED)

    def mapped(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor at ``offset`` in mapped memory, not verified. It must not be written to."""
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, self._size)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def verify(self, tensor: Tensor) -> None:
        """Hold a ``mapped`` tensor against its sums. Raises ScratchError."""
        offset, data = self._place(tensor), tensor_bytes(tensor)
        start = 0
        while start < len(data):
            n, _ = self._sums[offset + start]
            self._check(offset + start, data[start : start + n])
            start += n

    def unmap(self, tensor: Tensor) -> None:
        """Give back the memory that looking at a ``mapped`` tensor took. It can be looked at again."""
        assert self._map is not None
        offset = self._place(tensor)
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, offset + tensor.nbytes - first)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a ``mapped`` one of this file."""
        return self._map is not None and 0 <= self._place(tensor) < self._size

    def _place(self, tensor: Tensor) -> int:
        assert self._map is not None
        return tensor.data_ptr() - torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    def _check(self, offset: int, data: memoryview) -> None:
        if (len(data), _sum(data)) != self._sums[offset]:
            raise ScratchError(
                f"the scratch file in {self._folder} was altered: {format_bytes(len(data))} of {self._content} are not what "
                "was written. Check the disk."
            )

    @contextmanager
    def _explained(self, n_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in _FULL:
                free = shutil.disk_usage(self._folder).free
                reason += f": {format_bytes(n_bytes)} to write, {format_bytes(free)} free"
            raise ScratchError(
                f'{self._content} cannot be kept in {self._folder} ({reason}). Free space, or set train.{self._key}="none".'
            ) from error


def scratch_files(settings: TrainSettings, folder: Path) -> tuple[ScratchFile | None, ScratchFile | None]:
    """The files in ``folder`` that ``settings`` ask for: the optimizer's and that of activations."""
    state = activations = None
    if settings.offload_optimizer == "disk":
        state = ScratchFile(folder, "offload_optimizer", "the optimizer's state")
    if settings.offload_activations == "disk":
        activations = ScratchFile(folder, "offload_activations", "activations")
    return state, activations


def _sum(data: memoryview) -> int:
    """The sum of the 64-bit words of ``data``, modulo 2⁶⁴. A flipped bit always changes it."""
    words = np.frombuffer(data[: len(data) // 8 * 8], np.uint64) if len(data) >= 8 else np.zeros(1, np.uint64)
    return (int(np.add.reduce(words)) + int.from_bytes(data[len(data) // 8 * 8 :], "little")) % 2**64
