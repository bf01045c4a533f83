"""Master weights where the ranks of a replica hold pieces of some matrices, and all of them the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twostroke.model.decoder import Decoder
from twostroke.training.expert_parallel import share_experts
from twostroke.training.ranked_masters import DividedMasters, row_norms, trained_shapes
from twostroke.training.ranks import Part, Ranks, gathered, sum_over
from twostroke.training.tensor_parallel import cut_decoder
from twostroke.training.whole import Cut, CutPart


class CutMasters(DividedMasters):
    """Masters of the pieces that a rank holds by ``cut``, and of what all ranks of its replica hold whole.

    Each rank has a part of a whole one's gradient. These are added up in one order, so that their updates are the same on all.
    """

    kind: str
    """Of parallelism: the name of the ranks that share."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        self._shapes = trained_shapes(decoder)
        self._cuts = self._cut(decoder, ranks)
        super().__init__(decoder, dtype, stored, ranks)

    def _cut(self, decoder: Decoder, ranks: Ranks) -> Mapping[str, Cut]:
        """Leave this rank's pieces in ``decoder``; how each was cut."""
        raise NotImplementedError

    def _complete_gradients(self) -> None:
        sum_over(self.kind, [gradient for name, gradient in self.gradients.items() if name not in self._cuts], self.ranks)

    @property
    def group(self) -> Any:
        return self.ranks.mesh.get_group(self.kind)

    @property
    def _n(self) -> int:
        return self.ranks.layout.of_a_replica

    def _norms(self) -> Tensor:
        """√Σ‖row‖² of each gradient, of what all ranks hold of it."""
        squares = torch.stack(
            [
                row_norms(gradient).double().square().sum() * float(self.counts(name))
                for name, gradient in self.gradients.items()
            ]
        )
        return gathered(squares, self.group).sum(dim=0).sqrt().float()

    def is_piece(self, name: str) -> bool:
        return name in self._cuts

    def counts(self, name: str) -> bool:
        return name in self._cuts or self.ranks.place == 0

    def part(self, name: str, local: Tensor) -> Tensor | Part:
        return CutPart(local, self._cuts[name]) if name in self._cuts else local

    def piece(self, name: str, whole: Tensor, rank: int | None = None) -> Tensor:
        if name not in self._cuts:
            return whole
        return self._cuts[name].piece(whole, self.ranks.place if rank is None else rank, self._n)

    def joined(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        return self._cuts[name].joined(pieces)

    def piece_shape(self, name: str, rank: int) -> tuple[int, ...]:
        return self._cuts[name].piece_shape(rank, self._n)


class TensorMasters(CutMasters):
    """Those of tensor parallel. What is whole is multiplied with a part of the sequence or of the heads on each rank."""

    kind = "tensor"

    def _cut(self, decoder: Decoder, ranks: Ranks) -> Mapping[str, Cut]:
        return cut_decoder(decoder, ranks)


class ExpertMasters(CutMasters):
    """Those of expert parallel. An expert's rows of all ranks were where it is; the rest had a rank's own micro-batches."""

    kind = "expert"

    def _cut(self, decoder: Decoder, ranks: Ranks) -> Mapping[str, Cut]:
        return share_experts(decoder, ranks)
