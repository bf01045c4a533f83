"""``config.json`` files on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twostroke.core.errors import CorruptFileError, InputError
from twostroke.core.families.reader import Reader
from twostroke.core.families.registry import spec_from_config
from twostroke.core.spec import ModelSpec

MAX_CONFIG_BYTES = 4 * 2**20


def read_config(path: Path | str) -> dict[str, Any]:
    """The dictionary in ``path``, a ``config.json`` or a directory that holds one. Raises InputError or CorruptFileError."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file} does not exist. Give a model directory with a config.json, or the file itself.")
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``, which is at most ``MAX_CONFIG_BYTES`` long. Raises CorruptFileError."""
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise CorruptFileError(f"{file} is {file.stat().st_size} bytes; such a file is at most {MAX_CONFIG_BYTES}.")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CorruptFileError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(document, dict):
        raise CorruptFileError(f"{file} must hold a JSON object.")
    return document


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
