"""Which tensors of a model a scheme touches, and how a directory that we write says which it holds.

Directories are in compressed-tensors' layout, so that vLLM opens them as they are: the scheme's own (``core.schemes``), or
"mixed-precision" with some matrices in the scheme beside it, where each group of matrices names its format.
``model.published`` reads them, as it reads everybody's. What transformers opens of them, and what it refuses for reasons of its
own, stands in ``docs/formats.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twostroke.core.families import layout
from twostroke.core.schemes import SCHEMES, DiskLayout, Scheme
from twostroke.core.spec import ModelSpec
from twostroke.model.published.compressed_tensors import METHOD, MIXED_FORMAT
from twostroke.model.published.registry import module_name

if TYPE_CHECKING:
    from twostroke.core.families.weights import Entry


@dataclass(frozen=True)
class Quantisation:
    """How a directory holds its model: the blocks' matrices in ``scheme``, those of ``others``, linear layers by their names on
    disk, in the scheme beside it. The embedding, the head, norms and biases stay bf16: they are a small part of most models,
    and the head's errors reach the logits directly."""

    scheme: Scheme
    others: tuple[str, ...] = ()

    @property
    def beside(self) -> Scheme | None:
        """The scheme of ``others``; None where there can be none."""
        return None if self.scheme.beside is None else SCHEMES[self.scheme.beside]

    def of(self, entry: Entry) -> Scheme | None:
        """How the tensor of ``entry`` is held; None: plain."""
        if entry.matrix is None:
            return None
        return self.beside if module_name(entry.parts[0].name) in self.others else self.scheme

    def with_others(self, entries: Iterable[Entry]) -> Quantisation:
        """The same with the matrices of ``entries`` in the scheme beside it."""
        return Quantisation(self.scheme, tuple(sorted(module_name(part.name) for entry in entries for part in entry.parts)))

    def config(self) -> dict[str, Any]:
        """What goes into ``config.json`` as ``quantization_config``."""
        own = _layout(self.scheme)
        groups = {"group_0": _config_group(self.scheme, ["Linear"])}
        if self.others and self.beside is not None:
            groups["group_0"]["format"] = own.format
            groups["group_1"] = _config_group(self.beside, list(self.others)) | {"format": _layout(self.beside).format}
        return {
            "quant_method": METHOD,
            "format": MIXED_FORMAT if self.others else own.format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


def bits_per_weight(spec: ModelSpec, held: Quantisation) -> float:
    """Mean bits of a weight of the blocks' matrices, scales included."""
    n_bytes, n_weights = 0.0, 0
    for entry in layout(spec):
        scheme = held.of(entry)
        if scheme is not None:
            n_bytes += scheme.matrix_bytes(*entry.shape)
            n_weights += math.prod(entry.shape)
    return 8.0 * n_bytes / n_weights


def _layout(scheme: Scheme) -> DiskLayout:
    assert scheme.disk is not None, scheme.name
    return scheme.disk


def _config_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    own, bits = _layout(scheme), round(8 * scheme.element_bytes)
    weights: dict[str, Any] = {"num_bits": bits, "type": own.numbers, "dynamic": False}
    if scheme.group is None:
        weights |= {"symmetric": True, "strategy": "channel"}
    else:
        weights |= {"symmetric": False, "strategy": "group", "group_size": scheme.group}
    activations = None
    if own.activations is not None:
        activations = {"num_bits": 8, "type": own.activations, "symmetric": True, "strategy": "token", "dynamic": True}
    return {"targets": targets, "weights": weights, "input_activations": activations, "output_activations": None}
