"""Reads recorded traffic: Mooncake's JSON lines, with prefixes as hashed blocks, and the CSV of Azure's traces, without them.

Sources: github.com/kvcache-ai/Mooncake (FAST25-release/traces), github.com/Azure/AzurePublicDataset
(AzureLLMInferenceTrace_*.csv).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from twostroke.core.documents import is_integer, is_number
from twostroke.core.errors import ConfigError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_TRACE_TOKENS = 10**8
MOST_TRACE_MS = 1e14


def read_trace(file: Path, most: int) -> list[dict[str, Any]]:
    """The first ``most`` requests as rows of Mooncake's form, timestamps in ms since the first. Raises ConfigError, which names
    the line that cannot be read."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(islice(_azure(file, lines) if file.suffix.lower() == ".csv" else _mooncake(file, lines), most))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"trace {file} cannot be read: {why}. Name Mooncake's .jsonl or Azure's .csv.") from None
    if not rows:
        raise ConfigError(f"trace {file} holds no request.")
    first = min(row["timestamp"] for row in rows)
    return [row | {"timestamp": row["timestamp"] - first} for row in rows]


def _mooncake(file: Path, lines: IO[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not _holds(row):
            raise ConfigError(
                f"trace {file}, line {number} must be a JSON object with timestamp (ms), input_length, output_length (tokens) "
                "and, if it has them, hash_ids (whole numbers)."
            )
        yield row


def _holds(row: dict[str, Any]) -> bool:
    at, blocks = row.get("timestamp"), row.get("hash_ids", [])
    lengths = (row.get("input_length"), row.get("output_length"))
    return (
        is_number(at)
        and 0 <= at <= MOST_TRACE_MS
        and all(is_integer(n) and 0 <= n <= MOST_TRACE_TOKENS for n in lengths)
        and isinstance(blocks, list)
        and all(map(is_integer, blocks))
    )


def _azure(file: Path, lines: IO[str]) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(lines)
    if not set(AZURE_COLUMNS) <= set(reader.fieldnames or ()):
        raise ConfigError(f"trace {file} must have the columns {', '.join(AZURE_COLUMNS)}.")
    for row in reader:
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
            n_in, n_out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            found = {"timestamp": 1e3 * at, "input_length": n_in, "output_length": n_out}
        except (TypeError, ValueError):
            found = {}
        if not found or not _holds(found):
            raise ConfigError(f"trace {file}, line {reader.line_num} must have a time and two whole numbers of tokens.")
        yield found
