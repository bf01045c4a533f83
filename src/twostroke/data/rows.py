"""Builds the rows of a batch from token shards. It imports numpy and no torch, so that a worker process starts quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from twostroke.data.packing import IGNORE_INDEX, LEARNED, document_layout, next_token_targets
from twostroke.data.shards import TokenStream

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The arrays of a batch, (B, T) each. ``loader.Batch`` describes them."""

    tokens: Int64Array
    targets: Int64Array
    positions: Int64Array
    documents: npt.NDArray[np.int32]
    n_valid: int


class RowBuilder(Protocol):
    """Builds the rows that a request names. The request holds everything that changes, so that a builder has no state."""

    def build(self, request: Int64Array, n_rows: int) -> Rows: ...
    def description(self) -> dict[str, Any]:
        """The description from which ``builder_of`` makes the same builder in another process."""
        ...


class WindowBuilder:
    """Builds windows. A request is (B, 3): first token of the row's ring in the stream, length of the ring, start on the
    ring."""

    def __init__(self, tokens: TokenStream, sequence_length: int, eos_id: int) -> None:
        self._tokens, self._sequence_length, self._eos_id = tokens, sequence_length, eos_id

    def description(self) -> dict[str, Any]:
        return {
            "kind": "windows",
            "tokens": self._tokens.description(),
            "sequence_length": self._sequence_length,
            "eos_id": self._eos_id,
        }

    def build(self, request: Int64Array, n_rows: int) -> Rows:
        length = self._sequence_length + 1
        rows = np.empty((n_rows, length), dtype=np.int64)
        for row, (begin, n_tokens, start) in zip(rows, request.tolist(), strict=True):
            filled = 0
            while filled < length:  # a second pass only for the window that crosses the end of the ring
                window = self._tokens[begin + start : begin + min(start + length - filled, n_tokens)]
                row[filled : filled + len(window)] = window
                filled += len(window)
                start = 0
        tokens = np.ascontiguousarray(rows[:, :-1])
        positions, documents = document_layout(tokens, self._eos_id)
        targets = next_token_targets(rows, self._eos_id)
        return Rows(tokens, targets, positions, documents, int(np.count_nonzero(targets != IGNORE_INDEX)))


class ConversationRowBuilder:
    """Builds rows of whole conversations. A request is (P, 3), ordered by row: row, first token in the stream, length."""

    def __init__(self, tokens: TokenStream, marks: TokenStream, sequence_length: int, eos_id: int) -> None:
        self._tokens, self._marks = tokens, marks
        self._sequence_length, self._eos_id = sequence_length, eos_id

    def description(self) -> dict[str, Any]:
        return {
            "kind": "conversations",
            "tokens": self._tokens.description(),
            "marks": self._marks.description(),
            "sequence_length": self._sequence_length,
            "eos_id": self._eos_id,
        }

    def build(self, request: Int64Array, n_rows: int) -> Rows:
        shape = (n_rows, self._sequence_length)
        tokens = np.full(shape, self._eos_id, dtype=np.int64)
        targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        # Padding is a document of its own, so that no conversation attends to it.
        positions = np.zeros(shape, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int32)
        places, counts = [0] * n_rows, [0] * n_rows
        for row, begin, length in request.tolist():
            place = places[row]
            here = slice(place, place + length)
            tokens[row, here] = self._tokens[begin : begin + length]
            learned = (self._marks[begin + 1 : begin + length] & LEARNED).astype(bool)
            # Targets come from the int64 row and not from the shard: in its unsigned type −100 would be a token id.
            targets[row, place : place + length - 1] = np.where(learned, tokens[row, place + 1 : place + length], IGNORE_INDEX)
            positions[row, here] = np.arange(length)
            documents[row, here] = counts[row]
            places[row] += length
            counts[row] += 1
        for row, (place, count) in enumerate(zip(places, counts, strict=True)):
            positions[row, place:] = np.arange(self._sequence_length - place)
            documents[row, place:] = count
        return Rows(tokens, targets, positions, documents, int(np.count_nonzero(targets != IGNORE_INDEX)))


def builder_of(description: dict[str, Any]) -> RowBuilder:
    """The builder that ``description`` describes."""

    def stream(name: str) -> TokenStream:
        return TokenStream([Path(path) for path in description[name]["paths"]], description[name]["dtype"])

    length, eos_id = int(description["sequence_length"]), int(description["eos_id"])
    if description["kind"] == "windows":
        return WindowBuilder(stream("tokens"), length, eos_id)
    return ConversationRowBuilder(stream("tokens"), stream("marks"), length, eos_id)
