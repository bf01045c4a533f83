"""Measures what importing and exporting does to numbers: decoding what foreign files hold, rounding to what they are to hold,
looking for what is not finite."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twostroke.calibration.timing import Clock
from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import CorruptFileError
from twostroke.interop import mlx, onnx
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_encode import SEARCHED, encode, rounding_of, written_types
from twostroke.interop.gguf_write import write_header
from twostroke.interop.moved import WORDS
from twostroke.model.published.gguf_types import TYPES, TensorType, dequantise
from twostroke.model.published.reading import finite_values
from twostroke.model.published.registry import METHODS
from twostroke.model.published.storage import Storage, StoredMatrix
from twostroke.model.safetensors_file import TAGS
from twostroke.model.save import require_finite

SECONDS = 0.01
"""Of each of some sixty measurements, at least."""

N_WORDS = 4096

_OF_TAGS = {tag: dtype for dtype, tag in TAGS.items()}


def measure_formats(clock: Clock, side: int) -> dict[str, Any]:
    """``decoded_per_s``, ``encoded_per_s``, ``checked_per_s`` and ``coded_call_s`` of ``WeightRates``, of matrices of ``side``
    × 2·``side``, which stay in a cache. The best of two runs each, or of more in ``SECONDS``."""
    n, k = side, 2 * side
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(0))

    def rate(run: Callable[[], object]) -> float:
        return values.numel() / clock.best_s(run, seconds=SECONDS, least=2)

    decoded: dict[str, float] = {}
    for kind in TYPES.values():
        if kind.dtype is None:
            raw = _blocks(kind, n * k)
            decoded[kind.name] = rate(lambda kind=kind, raw=raw: dequantise(kind, raw, torch.bfloat16))  # type: ignore[misc]
    for storage, matrix in _stored(n, k):
        decoded[storage.timed_as] = rate(lambda s=storage, m=matrix: finite_values(s, m))  # type: ignore[misc]
    encoded: dict[str, float] = {}
    weights = torch.ones(k)
    for name in written_types():
        for weighed in (False, True) if name in SEARCHED else (False,):
            importance = weights if weighed else None
            encoded[rounding_of(TYPES[name], weighed)] = rate(
                lambda kind=TYPES[name], by=importance: encode(kind, values, by)  # type: ignore[misc]
            )
    for precision, bits in mlx.BITS.items():
        encoded[f"mlx {precision}"] = rate(lambda bits=bits: mlx.in_groups(values, bits))  # type: ignore[misc]
        encoded[f"onnx {precision}"] = rate(lambda bits=bits: onnx.in_blocks(values, bits))  # type: ignore[misc]
    encoded[WORDS] = N_WORDS / clock.best_s(_words, seconds=SECONDS, least=2)
    checked = {}
    for name in ("fp32", "bf16", "fp16"):
        tensor = values.to(getattr(torch, TORCH_NAMES[name]))
        checked[name] = rate(lambda tensor=tensor: require_finite("weights", tensor))  # type: ignore[misc]
    smallest = min((kind for kind in TYPES.values() if kind.dtype is None), key=lambda kind: kind.n_values)
    tiny = _blocks(smallest, 2 * smallest.n_values)  # two blocks: nothing but what starting takes
    call_s = clock.best_s(lambda: dequantise(smallest, tiny), seconds=SECONDS, least=2)
    return {"decoded_per_s": decoded, "encoded_per_s": encoded, "checked_per_s": checked, "coded_call_s": call_s}


def _words() -> None:
    """A vocabulary written as a GGUF file and read back, as an export does to see that nothing was lost."""
    with tempfile.TemporaryDirectory(prefix="twostroke-words-") as folder:
        file = Path(folder) / "words.gguf"
        with file.open("wb") as stream:
            write_header(stream, {"words": [f"word{i}" for i in range(N_WORDS)]}, ())
        GgufFile(file)


def _blocks(kind: TensorType, n: int) -> Any:
    """Bytes of ``n`` numbers, all alike."""
    return torch.ones(n // kind.n_values * kind.n_bytes, dtype=torch.uint8).numpy()


class _Ones:
    """Files in which every tensor is ones: scales of 1, codes that are alike, inputs in their groups' order."""

    directory = Path()

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def _stored(n: int, k: int) -> list[tuple[Storage, StoredMatrix]]:
    """A matrix of ones for each way to store that calibration tells apart, but for those that ones are no matrix of: tensors
    that describe themselves, or that must hold what a checkpoint says of them."""
    found: dict[str, tuple[Storage, StoredMatrix]] = {}
    for storage in (storage for method in METHODS.values() for storage in method.examples):
        stored = [one for one in storage.tensors(n, k) if not one.optional]
        if storage.timed_as in found or not all(one.shapes for one in stored):
            continue
        tensors = {one.suffix: torch.ones(one.shapes[0]).to(_OF_TAGS[one.tags[0]]) for one in stored}
        matrix = StoredMatrix(_Ones(tensors), "", n, k, {name: name for name in tensors})
        with contextlib.suppress(CorruptFileError):
            storage.read(matrix)
            found[storage.timed_as] = storage, matrix
    return list(found.values())
