"""Reads records of evaluation files, one JSON object a line, and fills templates from them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.errors import DataError, did_you_mean

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class Record:
    """The ``values`` of one line, and its place for error messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, path: str) -> Any:
        """The value at ``path``, which is keys and list indices joined by dots. Raises DataError if the record lacks it."""
        value: Any = self.values
        for key in path.split("."):
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                known = value if isinstance(value, Mapping) else ()
                near = did_you_mean(key, map(str, known)) if known else "Check the path in the task's file."
                raise DataError(f"{self.where} has no {path!r}, which the task needs. {near}")
        return value

    def fill(self, template: str) -> str:
        """``template`` with each ``{path}`` replaced by the text or number there. ``{{`` and ``}}`` stand for braces."""

        def text(match: re.Match[str]) -> str:
            piece = match.group(0)
            if piece in ("{{", "}}"):
                return piece[0]
            if match.group(1) is None:
                raise DataError(f"template {template!r} has an unmatched brace. Write {piece * 2} for the brace itself.")
            value = self.get(match.group(1))
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise DataError(
                    f"{self.where}: {match.group(1)!r} is {type(value).__name__}; a template takes text or numbers."
                )
            return str(value)

        return _PIECE.sub(text, template)


@dataclass(frozen=True)
class Records:
    rows: list[Record]
    sha256: str


def read_records(file: Path, most: int | None = None) -> Records:
    """The first ``most`` records of a .jsonl ``file`` without blank lines, and the sha256 of the whole file.

    Raises DataError if the file is missing, empty or holds something else."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise DataError(f"task data {file} cannot be read: {error.strerror or error}. Name another file.") from None
    rows: list[Record] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        if most is not None and len(rows) >= most:
            break
        where = f"{file}, line {number}"
        try:
            values = json.loads(line)
            if b"\\ud" in line.lower():
                json.dumps(values, ensure_ascii=False).encode()  # JSON allows half of a surrogate pair, and UTF-8 does not
        except UnicodeEncodeError:
            raise DataError(f"{where} holds half of a surrogate pair, which is not a character. Remove it.") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}. Write one JSON object a line.") from None
        if not isinstance(values, dict):
            raise DataError(f"{where} holds {type(values).__name__}; a record is a JSON object.")
        rows.append(Record(values, where))
    if not rows:
        raise DataError(f"task data {file} holds no record. Write one JSON object a line.")
    return Records(rows, hashlib.sha256(raw).hexdigest())
