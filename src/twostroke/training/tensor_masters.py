"""Master weights of tensor parallel: pieces of the matrices that a replica's ranks share, and what all of them hold whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.model.decoder import Decoder
from twostroke.training.ranked_masters import DividedMasters, row_norms
from twostroke.training.ranks import Part, Ranks
from twostroke.training.tensor_parallel import Cut, TensorGroup, cut_decoder, cuts
from twostroke.training.tree_sums import tree_sum


@dataclass(frozen=True)
class CutPart:
    """The piece ``local`` of a tensor that ranks of a replica hold by ``cut``."""

    local: Tensor
    cut: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cut.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def gather(self, ranks: Ranks) -> Tensor | None:
        if not ranks.is_first:
            dist.send(self.local.contiguous(), 0)
            return None
        n, pieces = ranks.layout.tensor, [self.local]
        for rank in range(1, n):
            pieces.append(torch.empty(self.cut.piece_shape(rank, n), dtype=self.dtype, device=self.local.device))
            dist.recv(pieces[-1], rank)
        return self.cut.joined(pieces)


class TensorMasters(DividedMasters):
    """Masters of the pieces that a rank of a replica holds, and of what all its ranks hold whole.

    The latter are multiplied with a part of the sequence or of the heads on each rank, so their gradients are summed over the
    ranks of a replica, in one order, and their updates are the same on all.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        self._shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        self._cuts = cuts(decoder.spec)
        cut_decoder(decoder, ranks)
        self._tensor_group = TensorGroup.of(ranks)
        super().__init__(decoder, dtype, stored, ranks)

    @property
    def group(self) -> Any:
        return self.ranks.mesh.get_group("tensor")

    @property
    def _n(self) -> int:
        return self.ranks.layout.tensor

    def _complete_gradients(self) -> None:
        partial = [gradient for name, gradient in self.gradients.items() if name not in self._cuts]
        flat = torch.cat([gradient.reshape(-1) for gradient in partial])
        summed = tree_sum(list(self._tensor_group.over_ranks(flat)))
        torch._foreach_copy_(
            partial, [s.view_as(g) for g, s in zip(partial, summed.split([g.numel() for g in partial]), strict=True)]
        )

    def _norms(self) -> Tensor:
        """√Σ‖row‖² of each gradient, of what all ranks hold of it."""
        squares = torch.stack(
            [
                row_norms(gradient).double().square().sum() * float(name in self._cuts or self._tensor_group.rank == 0)
                for name, gradient in self.gradients.items()
            ]
        )
        return self._tensor_group.over_ranks(squares).sum(dim=0).sqrt().float()

    def part(self, name: str, local: Tensor) -> Tensor | Part:
        return CutPart(local, self._cuts[name]) if name in self._cuts else local

    def piece(self, name: str, whole: Tensor, rank: int | None = None) -> Tensor:
        if name not in self._cuts:
            return whole
        return self._cuts[name].piece(whole, self._tensor_group.rank if rank is None else rank, self._n)

    def joined(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        return self._cuts[name].joined(pieces)

    def piece_shape(self, name: str, rank: int) -> tuple[int, ...]:
        return self._cuts[name].piece_shape(rank, self._n)
