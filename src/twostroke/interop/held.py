"""What a model directory holds, by its headers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from twostroke.core.families import layout, read_spec
from twostroke.core.families.weights import Entry
from twostroke.interop.moved import Held, HeldTensor
from twostroke.model.adapter_directory import base_directory, is_adapter_directory, read_adapter_config
from twostroke.model.families import stored_name
from twostroke.model.load import open_files
from twostroke.model.published.reading import QuantisedWeights
from twostroke.model.safetensors_file import MAPPED_BYTES

DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""safetensors' tags of plain numbers → our names."""

MERGED = "adapters, merged"
"""What calibration would call adding adapters to their base."""


def held_by(directory: Path) -> Held:
    """What reading the model in ``directory`` reads; of adapters also their base. Raises the errors of
    ``model.load.open_weights``."""
    if is_adapter_directory(directory):
        return _merged(base_directory(directory, read_adapter_config(directory)), directory)
    spec, opened = open_files(directory)
    quantised, files = (opened, opened.files) if isinstance(opened, QuantisedWeights) else (None, opened)

    def tensor(entry: Entry) -> HeldTensor:
        decoded: Counter[str] = Counter()
        dtypes = set()
        for part in entry.parts:
            storage = None if quantised is None else quantised.stored_as(part.name)
            if storage is None:
                dtypes.add(DTYPES[files.infos[stored_name(spec, part.name, files.infos)].dtype])
                continue
            dtypes.add("fp32")
            decoded[storage.timed_as] += math.prod(entry.stored_shape(part))
        is_new = bool(decoded) or len(entry.parts) > 1 or entry.interleaved or entry.by_group is not None
        return HeldTensor(math.prod(entry.shape), dtypes.pop() if len(dtypes) == 1 else "fp32", decoded, is_new)

    sizes = [info.n_bytes for info in files.infos.values()]
    mapped = min(sum(sizes), max(MAPPED_BYTES, *sizes))
    return Held(sum(sizes), mapped, {entry.canonical: tensor(entry) for entry in layout(spec)})


def _merged(directory: Path, adapters: Path) -> Held:
    """The base in ``directory`` with every matrix of a block in fp32, which is the most that merging changes."""
    base = held_by(directory)
    tensors = dict(base.tensors)
    for entry in layout(read_spec(directory)):
        if entry.matrix is not None:
            n = tensors[entry.canonical].n
            tensors[entry.canonical] = HeldTensor(n, "fp32", {**tensors[entry.canonical].decoded, MERGED: n}, is_new=True)
    added = sum(file.stat().st_size for file in adapters.glob("*.safetensors"))
    return Held(base.read_bytes + added, base.mapped_bytes + added, tensors)
