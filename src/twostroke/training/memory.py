"""Measures the memory of a run by the operating system, the accelerator and the tensors."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

CPU = torch.device("cpu")

_STATUS = Path("/proc/self/status")


def _status_bytes(field: str) -> int | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def memory_bytes(device: torch.device) -> int:
    """Bytes in use now: resident set of this process, or what torch allocated on the GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_memory_bytes(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use since ``reset_peak``, or since the process began if the system cannot reset the peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    measured = _status_bytes("VmHWM:")
    return measured if measured is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: torch.device) -> bool:
    """Reset the peak, so that what came before the run (training a tokenizer, compiling) does not count. Returns False if the
    system cannot reset it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM to the present resident set
    except OSError:
        return False
    return True


def saved_activations_bytes(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes that ``forward`` keeps for its backward pass. Each storage counts once; ``parameters`` and views of them do not
    count.

    They are measured by autograd's saved-tensor hooks on the code that trains, compiled or not.
    """
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}
    alive = []  # keeps storages alive, because a freed address could be used by another tensor

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(kept.values())
    del result
    return total
