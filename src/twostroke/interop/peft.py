"""Imports adapters that the ``peft`` package saved. Files that ours have and theirs lack come from their base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from twostroke.core.families import layout
from twostroke.core.spec import ModelSpec
from twostroke.interop.held import held_by
from twostroke.interop.source import SourceModel
from twostroke.model.adapter_directory import base_directory, read_adapter_config
from twostroke.model.families import read_entry
from twostroke.model.lazy_state import LazyState
from twostroke.model.load import open_weights


def lazy_state(spec: ModelSpec, get: Callable[[str], Tensor]) -> LazyState:
    """The canonical tensors, each read on access by ``get``, which takes stored names."""
    return LazyState({entry.canonical: partial(read_entry, entry, get) for entry in layout(spec)})


def tokenizer_directory(directory: Path, base: Path | None) -> Path | None:
    """The directory of the tokenizer of a model, or of adapters on ``base``: their own or the base's; None if neither has
    one."""
    candidates = [directory] if base is None else [directory, base]
    return next((place for place in candidates if (place / "tokenizer.json").is_file()), None)


def read_peft(directory: Path) -> SourceModel:
    """Adapters merged into their base, as a model to import. Raises the errors of ``model.adapter_directory.open_merged``."""
    base = base_directory(directory, read_adapter_config(directory))
    spec, get = open_weights(directory)
    return SourceModel(
        kind="PEFT adapter",
        spec=spec,
        state=lazy_state(spec, get),
        dtype="fp32",
        held=held_by(directory),
        tokenizer=tokenizer_directory(directory, base),
        notes=(f"the adapters were merged into {base}.",),
    )
