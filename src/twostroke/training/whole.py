"""Whole tensors of parts that ranks hold: each is gathered on the first rank when it is read, and not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.training.ranks import Part, Ranks


def rows_of(n_rows: int, shard: int, n_shards: int) -> tuple[int, int]:
    """(first, end) of the rows that rank ``shard`` of a replica holds of a tensor of ``n_rows``: ⌈rows/n⌉, the last fewer."""
    each = -(-n_rows // n_shards)
    return min(n_rows, shard * each), min(n_rows, (shard + 1) * each)


@dataclass(frozen=True)
class Cut:
    """A tensor of ``shape`` of which ranks hold pieces along ``dim``: a piece of each of the matrices packed there, whose
    lengths are ``parts``."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]

    def spans(self, rank: int, n: int) -> list[tuple[int, int]]:
        """(first, end) of the piece of each part that ``rank`` of ``n`` holds, counted in the part."""
        return [rows_of(length, rank, n) for length in self.parts]

    def piece_shape(self, rank: int, n: int) -> tuple[int, ...]:
        length = sum(end - first for first, end in self.spans(rank, n))
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def piece(self, whole: Tensor, rank: int, n: int) -> Tensor:
        """A copy of what ``rank`` of ``n`` holds of ``whole``."""
        parts = whole.split(list(self.parts), self.dim)
        spans = self.spans(rank, n)
        pieces = [part.narrow(self.dim, first, end - first) for part, (first, end) in zip(parts, spans, strict=True)]
        return torch.cat(pieces, self.dim).contiguous()

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of the ``pieces`` of all ranks, in their order."""
        n = len(pieces)
        by_rank = [
            piece.split([end - first for first, end in self.spans(rank, n)], self.dim) for rank, piece in enumerate(pieces)
        ]
        return torch.cat([by_rank[rank][part] for part in range(len(self.parts)) for rank in range(n)], self.dim)


@dataclass(frozen=True)
class ReplicasPart:
    """A tensor of each replica of one rank, of which ``local`` is this one's; ``shape`` is (replicas, …)."""

    local: Tensor
    shape: tuple[int, ...]
    is_of_replicas: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def gather(self, ranks: Ranks) -> Tensor | None:
        if not ranks.is_first:
            dist.send(self.local.contiguous(), 0)
            return None
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.local.device)
        whole[0].copy_(self.local)
        for replica in range(1, len(whole)):
            dist.recv(whole[replica], replica)
        return whole


class Whole(Mapping[str, Tensor]):
    """Tensors by name, some of them parts of ``ranks``; reading such a one gathers it, inside ``Ranks.led``."""

    def __init__(self, ranks: Ranks, tensors: Mapping[str, Tensor | Part], prefix: str) -> None:
        self._ranks, self._tensors, self._prefix = ranks, dict(tensors), prefix

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors[name]
        return found if isinstance(found, Tensor) else self._ranks.whole(self._prefix + name, self._ranks.parts())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def parts(self) -> dict[str, Part]:
        """Those that are parts, by the name under which ranks ask for them."""
        return {self._prefix + name: t for name, t in self._tensors.items() if not isinstance(t, Tensor)}

    def rows(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each, without gathering any."""
        return {name: (t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}


def rows_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each of ``tensors``, which may be parts."""
    if isinstance(tensors, Whole):
        return tensors.rows()
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
