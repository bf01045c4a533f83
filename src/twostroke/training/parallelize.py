"""How a decoder is made fast on its device: threads, and compilation of each block. The model file knows nothing of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from twostroke.training.loss import ChunkFunction, chunk_loss

Log = Callable[[str], None]


def pick_device() -> torch.device:
    """The first GPU where torch sees one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def use_available_cores() -> int:
    """Let torch use every core this process may run on, unless ``OMP_NUM_THREADS`` says otherwise; return the number."""
    if not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if torch.get_num_threads() != cores:
            torch.set_num_threads(cores)
    return torch.get_num_threads()


def why_not_compile(device: torch.device) -> str | None:
    """What is missing for ``torch.compile`` on ``device``; None where nothing is known to be."""
    if device.type != "cpu":
        return None  # Triton comes with torch's CUDA packages
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        return f"no C++ compiler ({compiler}) is on PATH (Debian: apt-get install g++)"
    return None


def compile_blocks(decoder: nn.Module) -> ChunkFunction:
    """Compile each block of ``decoder`` in place, and return a compiled chunk of the loss.

    Per block, not the whole model: all blocks share one graph, so compile time does not grow with depth, and the code between
    blocks stays plain Python. ``dynamic=False``: every batch of a run has one shape, and static shapes make the faster code.
    """
    for block in decoder.get_submodule("blocks").children():
        block.compile(dynamic=False)
    compiled: ChunkFunction = torch.compile(chunk_loss, dynamic=False)
    return compiled


def undo_compile(decoder: nn.Module) -> ChunkFunction:
    """Run the blocks as plain Python again, and return the plain chunk of the loss. (``compile`` has no public inverse.)"""
    for block in decoder.get_submodule("blocks").children():
        block._compiled_call_impl = None
    return chunk_loss


@contextmanager
def eager(decoder: nn.Module) -> Iterator[None]:
    """Run the blocks as plain Python meanwhile: scoring in the middle of a run has other shapes, each of which would be
    compiled."""
    blocks = list(decoder.get_submodule("blocks").children())
    compiled = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = call
