"""Activations on disk: what blocks keep for the backward pass waits in a scratch file, and is read back when backward asks.

Autograd's saved-tensor hooks see what it keeps, compiled or not. A storage is written once, however many views of it are
kept, and read once for all of them, so that gradients are the same bits (tests/training/test_offload.py). Each pass begins at
the file's start again: its activations are over when its backward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from twostroke.core.policy import LEAST_OFFLOADED_BYTES
from twostroke.training.scratch import ScratchFile


@dataclass(eq=False)
class _Stored:
    """A storage in the file, and in memory once one of its ``n_views`` was asked for until all were. ``before`` is the one that
    was written before it, which backward will probably ask for next."""

    offset: int
    n_bytes: int
    before: _Stored | None
    n_views: int = 0
    read: torch.UntypedStorage | None = None


@dataclass(frozen=True)
class _View:
    """A kept tensor: a view of a storage."""

    stored: _Stored
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclass
class OffloadedActivations:
    """Writes what autograd keeps to ``file``, all but ``own`` tensors, which are kept anyway, and what takes less than
    ``LEAST_OFFLOADED_BYTES``."""

    file: ScratchFile
    own: Iterable[Tensor]
    in_memory_bytes: int = 0  # of the last pass
    on_disk_bytes: int = 0
    _reserved: int = 0
    _last: _Stored | None = None
    _seen: set[int] = field(default_factory=set)  # storages that stay in memory
    _written: dict[int, tuple[StorageWeakRef, int, _Stored]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own = {tensor.untyped_storage()._cdata for tensor in self.own}

    @contextmanager
    def of_a_pass(self) -> Iterator[None]:
        """A context for a forward pass: what it keeps for its backward pass is written."""
        self.in_memory_bytes = self.on_disk_bytes = 0
        self._last = None
        self._written.clear()
        self._seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._written.clear()

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if storage._cdata in self._own:
            return tensor
        if storage.nbytes() < LEAST_OFFLOADED_BYTES or tensor.layout != torch.strided:
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.in_memory_bytes += storage.nbytes()
            return tensor
        # While a weak reference to a storage is held, no other one gets its address. Views share a version: it counts changes.
        reference, version, stored = self._written.get(storage._cdata, (None, -1, None))
        if stored is None or reference is None or reference.expired() or version != tensor._version:
            stored = self._store(storage)
            self._written[storage._cdata] = StorageWeakRef(storage), tensor._version, stored
        stored.n_views += 1
        return _View(stored, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _store(self, storage: torch.UntypedStorage) -> _Stored:
        offset, n_bytes = self.on_disk_bytes, storage.nbytes()
        if offset + n_bytes > self._reserved:
            self.file.reserve(offset + n_bytes - self._reserved)
            self._reserved = offset + n_bytes
        self.file.write(offset, torch.empty(0, dtype=torch.uint8).set_(storage))
        self.on_disk_bytes += n_bytes
        self._last = _Stored(offset, n_bytes, self._last)
        return self._last

    @torch.no_grad()
    def _unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        stored = kept.stored
        storage = stored.read
        if storage is None:
            read = torch.empty(stored.n_bytes, dtype=torch.uint8)
            self.file.read(stored.offset, read)
            self.file.read_bytes += stored.n_bytes
            storage = read.untyped_storage()
            if stored.before is not None:
                self.file.read_ahead(stored.before.offset, stored.before.n_bytes)
        stored.n_views -= 1
        stored.read = storage if stored.n_views > 0 else None
        return torch.empty(0, dtype=kept.dtype).set_(storage, kept.start, kept.shape, kept.strides)
