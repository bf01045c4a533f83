"""Fixed-length windows over the training stream, shuffled each epoch, with a state of a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.data.packing import IGNORED, document_layout, next_token_targets
from twostroke.data.permutation import permute, random_below
from twostroke.data.shards import TokenStream


@dataclass(frozen=True)
class Batch:
    """Packed rows for one forward and backward pass.

    tokens (B, T) int64; targets (B, T) int64, −100 where nothing is to be predicted (behind an end-of-text); positions
    (B, T) int64, from 0 in each document and each row; documents (B, T) int32, counted within the row: tokens attend
    within their document only. ``n_valid`` is the number of targets that count, known without asking a device.
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


class TrainingTokens(Protocol):
    """What a loader needs of prepared data."""

    @property
    def key(self) -> str: ...
    @property
    def eos_id(self) -> int: ...
    def train_tokens(self) -> TokenStream: ...


class ShuffledLoader:
    """What loaders of windows share: every window once an epoch, in an order computed from (seed, epoch), so that the state is
    the number of windows handed out and may be restored at any batch size."""

    batch_size: int
    seed: int
    windows_per_epoch: int
    _next_window: int

    @property
    def epoch(self) -> float:
        """Epochs handed out so far."""
        return self._next_window / self.windows_per_epoch

    def _next_order(self) -> Iterator[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
        """(epoch, which places of the next batch are of it, their windows) of each epoch the batch touches; moves on."""
        windows = np.arange(self._next_window, self._next_window + self.batch_size)
        self._next_window += self.batch_size
        epochs = windows // self.windows_per_epoch
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            yield epoch, chosen, permute(windows[chosen] % self.windows_per_epoch, self.windows_per_epoch, self.seed, epoch)

    def state(self) -> dict[str, int]:
        """``next_window``, and what a resumed run must agree on."""
        raise NotImplementedError

    def restore(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken. Raises InputError where it belongs to other data, seed or sequence length."""
        self._next_window = restored_window(state, self.state())


class PackedLoader(ShuffledLoader):
    """Endless batches of windows of T = ``sequence_length`` tokens over the stream of N training tokens, taken as a ring.

    An epoch is ⌊N / T⌋ windows that start T apart from an offset drawn for the epoch, so every token is in exactly one,
    save the N mod T before the offset, and epochs cut at different places. Their order is a permutation computed from
    (seed, epoch). The state is therefore the number of windows handed out; it may be restored at any batch size.
    (A ring, because the end of the stream is an end-of-text: the seam is one more boundary between documents.)
    """

    def __init__(self, prepared: TrainingTokens, batch_size: int, sequence_length: int, seed: int) -> None:
        if batch_size < 1 or sequence_length < 1:
            raise ConfigError(f"batch_size={batch_size} and sequence_length={sequence_length} must be at least 1.")
        self.batch_size, self.sequence_length, self.seed = batch_size, sequence_length, seed
        self.eos_id = prepared.eos_id
        self._tokens = prepared.train_tokens()
        self._n_tokens = len(self._tokens)
        self._data = int(prepared.key[:12], 16)
        self.windows_per_epoch = self._n_tokens // sequence_length
        if self.windows_per_epoch == 0:
            raise DataError(
                f"the training part has {self._n_tokens} tokens, fewer than sequence_length={sequence_length}. "
                "Give more text or a shorter sequence."
            )
        self._next_window = 0

    def next_starts(self) -> list[int]:
        """Where in the stream the next batch's windows start; moves on."""
        starts = np.empty(self.batch_size, dtype=np.int64)
        for epoch, chosen, order in self._next_order():
            offset = random_below(self._n_tokens, self.seed, epoch, 1)
            starts[chosen] = (offset + order * self.sequence_length) % self._n_tokens
        return list(map(int, starts))

    def next_batch(self) -> Batch:
        length = self.sequence_length + 1
        rows = np.empty((self.batch_size, length), dtype=np.int64)
        for row, start in zip(rows, self.next_starts(), strict=True):
            window = self._tokens[start : start + length]
            row[: len(window)] = window
            filled = len(window)
            while filled < length:  # over the seam of the ring
                window = self._tokens[: length - filled]
                row[filled : filled + len(window)] = window
                filled += len(window)
        tokens = rows[:, :-1]
        positions, documents = document_layout(tokens, self.eos_id)
        targets = next_token_targets(rows, self.eos_id)
        return Batch(
            torch.from_numpy(np.ascontiguousarray(tokens)),
            torch.from_numpy(targets),
            torch.from_numpy(positions),
            torch.from_numpy(documents),
            n_valid=int(np.count_nonzero(targets != IGNORED)),
        )

    def state(self) -> dict[str, int]:
        """All that a resumed run needs to continue with the very next window, and what it must agree on."""
        return {
            "next_window": self._next_window,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "n_tokens": self._n_tokens,
            "data": self._data,
        }


def restored_window(state: dict[str, int], own: dict[str, int]) -> int:
    """``next_window`` of a saved ``state``, after what it must agree on with a loader's ``own``. Raises InputError."""
    for name, found in own.items():
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or (name == "next_window" and value < 0):
            raise InputError(f"loader state has {name}={value!r}, which must be a whole number of at least 0.")
        if name != "next_window" and value != found:
            raise InputError(
                f"loader state was saved with {name}={value}, this run has {found}. Resume with the same data and recipe."
            )
    return state["next_window"]
