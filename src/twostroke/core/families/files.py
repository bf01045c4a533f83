"""``config.json`` files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twostroke.core.documents import read_object
from twostroke.core.errors import InputError
from twostroke.core.families.reader import Reader
from twostroke.core.families.registry import spec_from_config
from twostroke.core.spec import ModelSpec


def read_config(path: Path | str) -> dict[str, Any]:
    """The dictionary in ``path``, a ``config.json`` or a directory that holds one. Raises InputError or CorruptFileError."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file} does not exist. Give a model directory with a config.json, or the file itself.")
    return read_object(file)


def read_spec(path: Path | str) -> ModelSpec:
    """``ModelSpec`` of a ``config.json`` or of a model directory.

    From a directory, ids that only its ``generation_config.json`` lists as end of text (chat models end a turn and a
    text differently) are added to the config's own.
    """
    spec = spec_from_config(read_config(path))
    generation = Path(path) / "generation_config.json"
    if not generation.is_file():
        return spec
    more = Reader(read_object(generation)).token_ids("eos_token_id")
    return spec.with_(eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)))
