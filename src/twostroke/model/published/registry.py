"""Every published method that is read, and what a directory's ``config.json`` says about its matrices. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.core.errors import ConfigError
from twostroke.core.families import layout, read_config
from twostroke.core.families.reader import Reader
from twostroke.core.families.weights import Entry
from twostroke.core.schemes import SCHEMES
from twostroke.core.spec import ModelSpec
from twostroke.model.published import awq, bitsandbytes, compressed_tensors, fp8, gguf, gptq, mxfp4
from twostroke.model.published.storage import Storage, StorageOf

HEAD = "lm_head"
"""What leaves out the output head, whatever a family calls it."""


class Method(NamedTuple):
    """One row: what ``storage_of`` makes of a ``quantization_config``, and ways to store that it makes."""

    name: str
    storage_of: Callable[[dict[str, Any]], StorageOf]
    examples: tuple[Storage, ...]


METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(gptq.METHOD, gptq.storage_of, gptq.EXAMPLES),
        Method(awq.METHOD, awq.storage_of, awq.EXAMPLES),
        Method(compressed_tensors.METHOD, compressed_tensors.storage_of, compressed_tensors.EXAMPLES),
        Method(fp8.METHOD, fp8.storage_of, fp8.EXAMPLES),
        Method(fp8.FBGEMM, fp8.storage_of, fp8.FBGEMM_EXAMPLES),
        Method(mxfp4.METHOD, mxfp4.storage_of, mxfp4.EXAMPLES),
        Method(bitsandbytes.METHOD, bitsandbytes.storage_of, bitsandbytes.EXAMPLES),
        Method(gguf.METHOD, gguf.storage_of, gguf.EXAMPLES),
    )
}
"""By ``quant_method``."""


def storage_of(config: dict[str, Any]) -> StorageOf | None:
    """How the layers of a ``config.json`` are stored; None where all are plain. Raises ConfigError for what is not read."""
    quantised = Reader(config).object("quantization_config")
    if not quantised:
        return None
    method = quantised.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"quantization_config of method {method!r:.100} is not read. Read are {', '.join(METHODS)}. "
            "Start from the unquantised model."
        )
    return METHODS[method].storage_of(quantised)


def directory_holding(directory: Path | str, spec: ModelSpec) -> Holding | None:
    """How our engine holds the matrices of ``directory``, a model of ``spec``; None where they are plain. Raises ConfigError
    for what is not read."""
    of = storage_of(read_config(directory))
    return None if of is None else holding(list(layout(spec)), of)


def module_name(weight: str) -> str:
    """The linear layer of a stored weight: ``….q_proj.weight`` → ``….q_proj``."""
    return weight.removesuffix(".weight")


def storages(entry: Entry, of: StorageOf) -> tuple[Storage | None, ...]:
    """How each part of the tensor of ``entry`` is stored. Only linear layers are ever quantised: the blocks' matrices and the
    head."""
    is_head = entry.canonical == "head.weight"
    if (entry.matrix is None and not is_head) or (is_head and of(HEAD) is None):
        return (None,) * len(entry.parts)
    return tuple(of(module_name(part.name)) for part in entry.parts)


@dataclass(frozen=True)
class Holding:
    """How our engine holds the blocks' matrices of a directory: in ``scheme`` (None: none of them in codes), apart from those
    in ``others``, canonical names with the scheme beside it or None for plain numbers. ``labels``: how they are stored, in
    words, the most frequent first."""

    scheme: str | None
    others: dict[str, str | None]
    labels: tuple[str, ...]

    def of(self, canonical: str) -> str | None:
        """The scheme of a block's matrix."""
        return self.others.get(canonical, self.scheme)


def holding(entries: list[Entry], of: StorageOf) -> Holding:
    """What ``entries``, a model's whole layout, are held as. The plan's scheme is the one that keeps most weights in codes,
    with those of the scheme beside it. The rest becomes plain numbers, as where the parts of one matrix are stored
    differently."""
    found: dict[str, str | None] = {}
    weights: dict[str, int] = {}
    labels: dict[str, int] = {}
    for entry in entries:
        if entry.matrix is None:
            continue
        stored = storages(entry, of)
        schemes = {None if one is None else one.scheme(entry.matrix.k) for one in stored}
        scheme = found[entry.canonical] = schemes.pop() if len(schemes) == 1 else None
        for one in stored:
            label = "plain numbers" if one is None else one.label
            labels[label] = labels.get(label, 0) + entry.matrix.stored // len(stored)
        if scheme is not None:
            weights[scheme] = weights.get(scheme, 0) + entry.matrix.stored
    main = max(weights, key=lambda name: weights[name] + weights.get(SCHEMES[name].beside or "", 0), default=None)
    beside = None if main is None else SCHEMES[main].beside
    others = {name: own if own == beside else None for name, own in found.items() if own != main}
    return Holding(main, others, tuple(sorted(labels, key=lambda label: -labels[label])))
