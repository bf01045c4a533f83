"""Conversations that a server has kept (``serve --capture``): a folder of JSON lines that training reads, and ratings beside.

``conversations-000001.jsonl`` … have a conversation a line, in the layout "messages" with ``id``, ``choice``, ``model``,
``system_fingerprint``, ``created``, ``finish_reason`` and the ``key`` of who asked. ``ratings.ndjson`` has a rating a line;
its name is none that sources of data are looked for under, so the folder itself is a source.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.aside import file_beside
from twostroke.core.errors import DataError

CONVERSATIONS = re.compile(r"conversations-([0-9]{6})\.jsonl")
RATINGS = "ratings.ndjson"


@dataclass
class Chosen:
    """How many conversations were read, and why some were left out."""

    read: int = 0
    written: int = 0
    unrated: int = 0
    rated_lower: int = 0
    continued: int = 0


def conversation_files(folder: Path) -> list[Path]:
    """The files of ``folder``, the oldest first. Raises DataError if there are none."""
    try:
        found = sorted(path for path in folder.iterdir() if CONVERSATIONS.fullmatch(path.name))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}.") from None
    if not found:
        raise DataError(
            f"{folder} holds no captured conversations (conversations-….jsonl). Name the folder of serve --capture."
        )
    return found


def ratings_in(folder: Path) -> dict[tuple[str, int], float]:
    """The last rating of each answer, by its id and choice."""
    ratings: dict[tuple[str, int], float] = {}
    path = folder / RATINGS
    for where, record in _records(path) if path.is_file() else ():
        try:
            ratings[str(record["id"]), int(record["choice"])] = float(record["rating"])
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{where} is not a rating. Leave the line out.") from None
    return ratings


def choose_rated(folder: Path, out: Path, least: float | None) -> Chosen:
    """Write the conversations of ``folder`` that are rated at least ``least`` (None: all) to ``out``, each with its ``rating``,
    without those that a later one continues, which repeats them. Raises DataError."""
    files, ratings = conversation_files(folder), ratings_in(folder)
    continued: set[bytes] = set()
    for path in files:
        for where, record in _records(path):
            continued.update(_prefixes(record, where)[:-1])
    chosen = Chosen()
    try:
        with file_beside(out) as aside, aside.open("w", encoding="utf-8") as stream:
            for path in files:
                for where, record in _records(path):
                    chosen.read += 1
                    rating = ratings.get((str(record.get("id")), int(record.get("choice", 0))))
                    if least is not None and rating is None:
                        chosen.unrated += 1
                    elif least is not None and rating is not None and rating < least:
                        chosen.rated_lower += 1
                    elif _prefixes(record, where)[-1] in continued:
                        chosen.continued += 1
                    else:
                        chosen.written += 1
                        stream.write(json.dumps(record | {"rating": rating}, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}. Name another file.") from None
    return chosen


def _prefixes(record: Mapping[str, Any], where: str) -> list[bytes]:
    """A digest of the messages up to each answer. Of two records one continues the other if it has its last one."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where} has no list of messages. Leave the line out.")
    digest, found = hashlib.sha256(), []
    for message in messages:
        digest.update(json.dumps([message.get("role"), message.get("content")]).encode())
        if message.get("role") == "assistant":
            found.append(digest.copy().digest())
    return found or [digest.digest()]


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                where = f"{path} line {number}"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise DataError(f"{where} is not valid JSON. Leave the line out.") from None
                if not isinstance(record, dict):
                    raise DataError(f"{where} is not a JSON object. Leave the line out.")
                yield where, record
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
