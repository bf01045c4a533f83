"""Packs whole conversations into rows of fixed length and shuffles the rows each epoch. The state is a few numbers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twostroke.core.errors import ConfigError, DataError
from twostroke.data.loader import MixedSource, ShuffledLoader, TrainingTokens
from twostroke.data.packing import BEGINS, LEARNED
from twostroke.data.rows import ConversationRowBuilder, Int64Array
from twostroke.data.shards import TokenStream


class MarkedTokens(TrainingTokens, Protocol):
    """The prepared conversations that a loader reads."""

    def train_marks(self) -> TokenStream: ...


@dataclass(frozen=True)
class Fitting:
    """How conversations were fitted into the sequence length. ``n_cut`` were cut to their beginning. ``n_dropped`` were left
    out: they were too long and ``too_long`` is "drop", or no token to learn was left in them."""

    n_conversations: int
    n_cut: int
    n_dropped: int
    n_rows: int
    filled: float  # share of the rows' tokens that belong to conversations


def pack_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of indices into ``lengths``, whose lengths sum to at most ``row_length`` in each row.

    Best-fit decreasing: the longest goes first, into the fullest row that has room. It needs at most 11/9 of the fewest
    possible rows plus one (Johnson 1973), and equal lengths give equal rows. Each length must be at most ``row_length``. The
    worst case takes O(n log n + n · row_length / 64).
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens → rows with so many (a heap, so that the order is fixed)
    rooms = 0  # bit r is set if a row has r tokens free: the tightest fit is the lowest bit, without a search tree
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = rooms >> lengths[index]
        if fitting:
            room = lengths[index] + (fitting & -fitting).bit_length() - 1
            row = heapq.heappop(with_room[room])
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        left = room - lengths[index]
        heapq.heappush(with_room.setdefault(left, []), row)
        rooms |= 1 << left
    return rows


class ConversationLoader(ShuffledLoader):
    """Endless batches of rows of T = ``sequence_length`` tokens. Each row holds whole conversations, then padding.

    A conversation is a document: positions begin at 0 in it, and its tokens attend only to each other. Targets are its learned
    tokens, so the loss counts nothing else. The lengths alone decide which conversations share a row. The order of the rows is
    a permutation computed from (seed, epoch), so the state is the number of rows handed out, and it can be restored at any
    batch size. Padding consists of end-of-text tokens in a document of their own, without targets. With a ``mixture``, all
    conversations of a row are of one source.
    """

    def __init__(
        self,
        prepared: MarkedTokens,
        batch_size: int,
        sequence_length: int,
        seed: int,
        too_long: str = "cut",
        mixture: Sequence[MixedSource] = (),
    ) -> None:
        if batch_size < 1 or sequence_length < 2:
            raise ConfigError(f"batch_size={batch_size} must be at least 1 and sequence_length={sequence_length} at least 2.")
        self.sequence_length = sequence_length
        self.eos_id = prepared.eos_id
        tokens, marks = prepared.train_tokens(), prepared.train_marks()
        self._n_tokens = len(tokens)
        self._data = int(prepared.key[:12], 16)
        self._begins, self._lengths, n_cut, n_dropped = _fit(marks, sequence_length, too_long)
        self._rows: list[list[int]] = []
        self._first_rows, n_rows_of = [], []
        for source in mixture or [MixedSource("the training part", 0, self._n_tokens, 1.0)]:
            ends = [source.first_token, source.first_token + source.n_tokens]
            first, last = np.searchsorted(self._begins, ends).tolist()
            if first == last:
                raise DataError(
                    f"{source.name} has no conversation to train on with an answer within train.sequence_length="
                    f"{sequence_length} tokens. Raise train.sequence_length, or leave the source out."
                )
            rows = pack_rows(self._lengths[first:last].tolist(), sequence_length)
            self._first_rows.append(len(self._rows))
            n_rows_of.append(len(rows))
            self._rows += [[first + index for index in row] for row in rows]
        super().__init__(batch_size, seed, n_rows_of, [s.weight for s in mixture])
        n_rows = len(self._rows)
        filled = float(self._lengths.sum()) / (n_rows * sequence_length)
        self.fitting = Fitting(len(self._lengths), n_cut, n_dropped, n_rows, filled)
        self.builder = ConversationRowBuilder(tokens, marks, sequence_length, self.eos_id)

    def next_rows(self) -> list[int]:
        """Advance, and return the row numbers of the next batch."""
        rows = np.empty(self.batch_size, dtype=np.int64)
        for source, _, places, order in self.next_windows():
            rows[places] = self._first_rows[source] + order
        return list(map(int, rows))

    def next_request(self) -> Int64Array:
        conversations = [(i, index) for i, row in enumerate(self.next_rows()) for index in self._rows[row]]
        places, indices = np.array(conversations, dtype=np.int64).reshape(-1, 2).T
        return np.stack((places, self._begins[indices], self._lengths[indices]), axis=1)

    def identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "n_tokens": self._n_tokens,
            "n_rows": self.windows_per_epoch,
            "data": self._data,
        }


def _fit(stream: TokenStream, sequence_length: int, too_long: str) -> tuple[Int64Array, Int64Array, int, int]:
    """(first token of each conversation that is used, its number of used tokens, conversations cut, conversations left out)."""
    marks = stream[0 : len(stream)]
    begins = np.flatnonzero(marks & BEGINS).astype(np.int64)
    ends = np.append(begins[1:], len(marks))
    lengths = ends - begins
    is_long = lengths > sequence_length
    if too_long == "error" and is_long.any():
        raise DataError(
            f"{int(is_long.sum())} of {len(lengths)} conversations are longer than train.sequence_length="
            f"{sequence_length}; the longest has {int(lengths.max())} tokens. Raise train.sequence_length, or set "
            'data.too_long to "cut" or "drop".'
        )
    kept = np.minimum(lengths, sequence_length)
    # A conversation's first token is never a target, so it does not count even if it is marked as learned.
    learned = np.concatenate(([0], np.cumsum(marks & LEARNED, dtype=np.int64)))
    teaches = learned[begins + kept] - learned[begins + 1] > 0
    use = teaches & ~is_long if too_long == "drop" else teaches
    if not use.any():
        raise DataError(
            f"none of {len(lengths)} conversations has an answer within train.sequence_length={sequence_length} "
            f"tokens; the shortest has {int(lengths.min())}. Raise train.sequence_length."
        )
    return begins[use], kept[use], int((use & is_long).sum()), int((~use).sum())
