"""Adapters that the ``peft`` package saved: what they lack beside ours is taken from their base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from twostroke.core.spec import ModelSpec
from twostroke.interop.source import LazyState, SourceModel
from twostroke.model.adapter_directory import base_directory, read_adapter_config
from twostroke.model.families import layout
from twostroke.model.families.layout import read_entry
from twostroke.model.load import open_weights


def lazy_state(spec: ModelSpec, get: Callable[[str], Tensor]) -> LazyState:
    """The canonical tensors that ``get`` reads by their stored names, each when it is asked for."""
    return LazyState({entry.canonical: partial(read_entry, entry, get) for entry in layout(spec)})


def tokenizer_directory(directory: Path, base: Path | None) -> Path | None:
    """Where the tokenizer of a model, or of adapters on ``base``, is: beside them, else with the base; None where nowhere."""
    candidates = [directory] if base is None else [directory, base]
    return next((place for place in candidates if (place / "tokenizer.json").is_file()), None)


def read_peft(directory: Path) -> SourceModel:
    """Adapters merged into their base, as a model to import. Raises as ``model.adapter_directory.open_merged``."""
    base = base_directory(directory, read_adapter_config(directory))
    spec, get = open_weights(directory)
    return SourceModel(
        kind="PEFT adapter",
        spec=spec,
        state=lazy_state(spec, get),
        dtype="fp32",
        tokenizer=tokenizer_directory(directory, base),
        notes=(f"the adapters were merged into {base}.",),
    )
