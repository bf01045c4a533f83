"""Makes a decoder fast on its device: threads, and compilation of each block. The model's own files do not depend on it."""

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
    """The first GPU that torch sees, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def use_available_cores() -> int:
    """Let torch use all cores that this process may run on, unless ``OMP_NUM_THREADS`` is set. Returns the number of
    threads."""
    if not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if torch.get_num_threads() != cores:
            torch.set_num_threads(cores)
    return torch.get_num_threads()


def why_not_compile(device: torch.device) -> str | None:
    """A sentence on what ``torch.compile`` lacks on ``device``; None if it should work."""
    if device.type != "cpu":
        return None  # Triton comes with torch's CUDA packages
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        return f"no C++ compiler ({compiler}) is on PATH (Debian: apt-get install g++)"
    return None


def compile_blocks(decoder: nn.Module) -> ChunkFunction:
    """Compile each block of ``decoder`` in place, and return a compiled chunk of the loss.

    Blocks are compiled one by one because they share one graph: the time to compile does not grow with depth, and the code
    between them stays plain Python. With ``dynamic=False`` shapes are static, which gives faster code; all batches of a run
    have one shape. Beside a frozen embedding the first block's input would need no gradient, and its graph would be another:
    14 of 31 seconds of compiling adapters on two cores.
    """
    decoder.get_submodule("embed").register_forward_hook(_needs_gradient)
    for block in decoder.get_submodule("blocks").children():
        block.compile(dynamic=False)
    compiled: ChunkFunction = torch.compile(chunk_loss, dynamic=False)
    return compiled


def _needs_gradient(module: nn.Module, arguments: object, embedded: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not embedded.requires_grad:
        embedded.requires_grad_()


def undo_compile(decoder: nn.Module) -> ChunkFunction:
    """Run the blocks uncompiled again, and return the uncompiled chunk of the loss. torch has no public inverse of
    ``compile``."""
    for block in decoder.get_submodule("blocks").children():
        block._compiled_call_impl = None
    return chunk_loss


@contextmanager
def eager(decoder: nn.Module) -> Iterator[None]:
    """A context in which the blocks run uncompiled. Scoring in the middle of a run has other shapes, and each would be
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
