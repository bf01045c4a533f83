"""Loads fixed-length windows of the training stream, shuffled each epoch. The state is a few numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.data.mixture import Mixture
from twostroke.data.permutation import permute, random_below
from twostroke.data.rows import Int64Array, RowBuilder, Rows, WindowBuilder
from twostroke.data.shards import PreparedData, TokenStream


@dataclass(frozen=True)
class Batch:
    """Packed rows for one forward and backward pass.

    tokens (B, T) int64. targets (B, T) int64, with −100 (``IGNORE_INDEX``) where the loss counts nothing, as after an
    end-of-text. positions (B, T) int64 restart at 0 in each document and in each row. documents (B, T) int32 count documents
    within the row; tokens attend within their document only. ``n_valid`` is the number of counted targets. It is an int, so
    that dividing the loss by it does not wait for a device.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    n_valid: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return Batch(move(self.tokens), move(self.targets), move(self.positions), move(self.documents), self.n_valid)


def batch_of(rows: Rows) -> Batch:
    return Batch(
        torch.from_numpy(rows.tokens),
        torch.from_numpy(rows.targets),
        torch.from_numpy(rows.positions),
        torch.from_numpy(rows.documents),
        rows.n_valid,
    )


class TrainingTokens(Protocol):
    """The prepared data that a loader reads."""

    @property
    def key(self) -> str: ...
    @property
    def eos_id(self) -> int: ...
    def train_tokens(self) -> TokenStream: ...


@dataclass(frozen=True)
class MixedSource:
    """A source of a mixture: its range of tokens in the training stream, and its weight."""

    name: str
    first_token: int
    n_tokens: int
    weight: float


def mixed_sources(prepared: PreparedData, weights: Sequence[float]) -> tuple[MixedSource, ...]:
    """The sources of ``prepared`` with the recipe's ``weights``; empty without weights. Raises ConfigError, DataError."""
    if not weights:
        return ()
    ranges = prepared.source_ranges()
    if len(ranges) != len(weights):
        raise ConfigError(
            f"data.weights has {len(weights)} entries and the prepared data {len(ranges)} sources. Give one weight a source."
        )
    return tuple(MixedSource(*where, weight) for where, weight in zip(ranges, weights, strict=True))


class ShuffledLoader:
    """The base of loaders: each window comes once an epoch, in an order computed from (seed, epoch).

    The state is therefore the number of windows handed out, and it can be restored at any batch size. With ``weights``, one for
    each entry of ``windows``, ``data.mixture`` mixes the sources. Each source then has its own epochs and order, and the state
    also holds the number of windows that each source gave.
    """

    builder: RowBuilder

    def __init__(self, batch_size: int, seed: int, windows: Sequence[int], weights: Sequence[float] = ()) -> None:
        self.batch_size, self.seed = batch_size, seed
        self.source_windows = tuple(windows)
        self.windows_per_epoch = sum(windows)
        self.mixture = Mixture(weights) if weights else None
        # A hash of the weights. It is in the state, so that a run with other weights cannot resume from it.
        self._mixture_name = (
            int.from_bytes(hashlib.sha256(repr(self.mixture.shares).encode()).digest()[:6]) if self.mixture else 0
        )
        self._next_window = 0
        self._own: tuple[int, ...] = (0,)
        self._of = 1
        self._turn = self._at = 0  # of ``_own``, and of the batches in a row, that come next

    def share_out(self, own: Sequence[int], of: int) -> None:
        """Of each ``of`` batches in a row, hand out by ``next_own_request`` those numbered ``own``: a rank's part of a step."""
        self._own, self._of = tuple(own), of

    @property
    def epoch(self) -> float:
        """Epochs handed out so far: windows handed out ÷ windows of all sources."""
        return self._next_window / self.windows_per_epoch

    def source_epochs_at(self, state: dict[str, int]) -> tuple[float, ...]:
        """Epochs of each source of the mixture at ``state``; one number without a mixture."""
        if self.mixture is None:
            return (state["next_window"] / self.windows_per_epoch,)
        return tuple(state[f"source_{i}"] / windows for i, windows in enumerate(self.source_windows))

    def next_windows(self) -> Iterator[tuple[int, int, Int64Array, Int64Array]]:
        """Advance by one batch. Yields (source, epoch, rows of the batch, window numbers of the source) for each source and
        epoch that the batch touches. A batch may cross the end of an epoch, and each epoch has its own permutation."""
        sources, windows = self._take()
        for source in np.unique(sources).tolist():
            n_windows, seed = self.source_windows[source], self._seed_of(source)
            epochs = np.where(sources == source, windows // n_windows, -1)  # −1 for rows of other sources
            for epoch in np.unique(epochs[epochs >= 0]).tolist():
                places = np.flatnonzero(epochs == epoch)
                yield source, epoch, places, permute(windows[places] % n_windows, n_windows, seed, epoch)

    def _take(self) -> tuple[Int64Array, Int64Array]:
        """Advance by one batch. (source, number in its source) of each window."""
        if self.mixture is None:
            sources = np.zeros(self.batch_size, dtype=np.int64)
            windows = np.arange(self._next_window, self._next_window + self.batch_size)
        else:
            sources, windows = self.mixture.take(self.batch_size)
        self._next_window += self.batch_size
        return sources, windows

    def next_own_request(self) -> Int64Array:
        """Advance to the next batch that ``share_out`` gives to this process, after its last one to the end of the row."""
        for _ in range(self._own[self._turn] - self._at):
            self._take()
        request = self.next_request()
        self._at, self._turn = self._own[self._turn] + 1, self._turn + 1
        if self._turn == len(self._own):
            for _ in range(self._of - self._at):
                self._take()
            self._at = self._turn = 0
        return request

    def _seed_of(self, source: int) -> int:
        # A seed for each source of a mixture, so that sources of equal length do not have the same order.
        return self.seed if self.mixture is None else random_below(2**62, self.seed, source, 2)

    def next_request(self) -> Int64Array:
        """Advance, and return the request from which ``builder`` builds the next batch."""
        raise NotImplementedError

    def next_batch(self) -> Batch:
        return batch_of(self.builder.build(self.next_request(), self.batch_size))

    def identity(self) -> dict[str, int]:
        """The settings that a resumed run must share."""
        raise NotImplementedError

    def state(self) -> dict[str, int]:
        """The place in the data that a resumed run continues from, and the settings that it must share."""
        counts = self.mixture.state() | {"weights": self._mixture_name} if self.mixture else {}
        return {"next_window": self._next_window, **counts, **self.identity()}

    def restore(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken, with the first batch of a row. Raises InputError if it belongs to other data,
        seed or sequence length."""
        own = self.identity() | ({"weights": self._mixture_name} if self.mixture else {})
        next_window = restored_window(state, {"next_window": 0, **own})
        if self.mixture is not None:
            self.mixture.restore(state, next_window)
        elif "weights" in state:
            raise InputError(
                "loader state was saved with data.weights, and this run has no weights. Resume with the same recipe."
            )
        self._next_window = next_window
        self._at = self._turn = 0


class PackedLoader(ShuffledLoader):
    """Endless batches of windows of T = ``sequence_length`` tokens over the stream of N training tokens, taken as a ring.

    An epoch is ⌊N / T⌋ windows that start T apart from an offset drawn for the epoch. So every token is in exactly one window,
    except for the N mod T tokens before the offset, and each epoch cuts documents at other places. The stream can be a ring
    because it ends with an end-of-text: the seam is one more boundary between documents. With a ``mixture`` each source is a
    ring of its own.
    """

    builder: WindowBuilder

    def __init__(
        self,
        prepared: TrainingTokens,
        batch_size: int,
        sequence_length: int,
        seed: int,
        mixture: Sequence[MixedSource] = (),
    ) -> None:
        if batch_size < 1 or sequence_length < 1:
            raise ConfigError(f"batch_size={batch_size} and sequence_length={sequence_length} must be at least 1.")
        self.sequence_length = sequence_length
        self.eos_id = prepared.eos_id
        tokens = prepared.train_tokens()
        self._n_tokens = len(tokens)
        self._data = int(prepared.key[:12], 16)  # the state names the data in 48 bits; a state holds integers only
        sources = mixture or [MixedSource("the training part", 0, self._n_tokens, 1.0)]
        for source in sources:
            if source.n_tokens < sequence_length:
                raise DataError(
                    f"{source.name} has {source.n_tokens} tokens{' to train on' if mixture else ''}, fewer than "
                    f"sequence_length={sequence_length}. Give more text or a shorter sequence_length."
                )
        self._rings = [(source.first_token, source.n_tokens) for source in sources]
        super().__init__(batch_size, seed, [n // sequence_length for _, n in self._rings], [s.weight for s in mixture])
        self.builder = WindowBuilder(tokens, sequence_length, self.eos_id)

    def next_request(self) -> Int64Array:
        request = np.empty((self.batch_size, 3), dtype=np.int64)
        for source, epoch, places, windows in self.next_windows():
            begin, n_tokens = self._rings[source]
            offset = random_below(n_tokens, self._seed_of(source), epoch, 1)  # each epoch cuts documents at other places
            # WindowBuilder's row: first token of the ring, its length, start on it. A worker needs no other state.
            request[places, 0], request[places, 1] = begin, n_tokens
            request[places, 2] = (offset + windows * self.sequence_length) % n_tokens
        return request

    def identity(self) -> dict[str, int]:
        return {"seed": self.seed, "sequence_length": self.sequence_length, "n_tokens": self._n_tokens, "data": self._data}


def restored_window(state: dict[str, int], own: dict[str, int]) -> int:
    """``next_window`` of a saved ``state``. Raises InputError if any other entry differs from the loader's ``own``."""
    for name, found in own.items():
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or (name == "next_window" and value < 0):
            raise InputError(f"loader state has {name}={value!r}, which must be a whole number of at least 0.")
        if name != "next_window" and value != found:
            raise InputError(
                f"loader state was saved with {name}={value}, and this run has {found}. Resume with the same data and recipe."
            )
    return state["next_window"]
