"""Weights of a model directory, in canonical names, with the codes of quantised ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from twostroke.core.families import read_config
from twostroke.core.schemes import SCHEMES
from twostroke.core.spec import ModelSpec
from twostroke.kernels.codes import Codes
from twostroke.model.adapter_directory import is_adapter_directory
from twostroke.model.families import read_entry
from twostroke.model.lazy_state import LazyState
from twostroke.model.load import load_state
from twostroke.model.published.reading import QuantisedWeights


def load_any_state(directory: Path | str) -> tuple[ModelSpec, LazyState]:
    """Spec and canonical tensors. Matrices that our engine holds in codes come as ``kernels.codes.Codes``: ``<name>.weight``
    beside ``<name>.scale`` and, of groups, ``<name>.zero``; other quantised ones as the fp32 numbers that they stand for.

    Raises the errors of ``model.load.open_weights``.
    """
    if is_adapter_directory(directory) or not read_config(directory).get("quantization_config"):
        return load_state(directory)
    weights = QuantisedWeights(directory)
    readers: dict[str, Callable[[], Tensor]] = {}
    read = _Latest(weights)
    for name, entry in weights.entries.items():
        scheme = None if entry.matrix is None else weights.holding.of(name)
        if scheme is None:
            readers[name] = partial(read_entry, entry, weights.get)
            continue
        stem = name.removesuffix(".weight")
        readers[name] = partial(read.part, name, 0)
        readers[f"{stem}.scale"] = partial(read.part, name, 1)
        if SCHEMES[scheme].has_zeros:
            readers[f"{stem}.zero"] = partial(read.part, name, 2)
    return weights.spec, LazyState(readers)


class _Latest:
    """Codes of the matrix that was read last: its codes, scales and zero points are asked for one after another."""

    def __init__(self, weights: QuantisedWeights) -> None:
        self._weights = weights
        self._name = ""
        self._codes: Codes | None = None

    def part(self, name: str, index: int) -> Tensor:
        if self._name != name or self._codes is None:
            self._name, self._codes = name, self._weights.codes(name)
        tensor: Tensor | None = self._codes[index]
        assert tensor is not None
        return tensor


def expanded(state: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor ``name``, fp32 if it is held in codes."""
    stem = name.removesuffix(".weight")
    scale = state.get(f"{stem}.scale")
    return state[name] if scale is None else Codes(state[name], scale, state.get(f"{stem}.zero")).values()
