"""Master weights of pipeline parallel: each rank of a replica holds those of its stage, a run of blocks and what stands at
their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.model.decoder import Decoder
from twostroke.training.ranked_masters import OPTIMIZER, DividedMasters, trained_shapes
from twostroke.training.ranks import Part, Ranks
from twostroke.training.stages import stage_of
from twostroke.training.whole import OwnedPart, Whole

FORWARD, BACKWARD, GENERATOR, TIED = range(1, 5)
"""Tags of what stages send each other: residual streams, their gradients, states of random generators, a tied head."""


class _StateRow(NamedTuple):
    """A tensor of an optimizer's state: the stages that hold it, its shape and type."""

    holders: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelineMasters(DividedMasters):
    """Masters of a stage. What other stages hold is emptied in the decoder, but for an embedding that is the head as well: the
    last stage computes with a copy of it, whose gradient goes to the first stage after each micro-batch."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, stored: torch.dtype, ranks: Ranks) -> None:
        self._stage, self._n = ranks.pipeline, ranks.layout.pipeline
        self._shapes = trained_shapes(decoder)
        held = [name for name, _ in (*decoder.named_parameters(), *decoder.named_buffers())]
        self._stage_of = {name: stage_of(name, self._n, decoder.spec.n_layers) for name in held}
        self._embed = decoder.embed.weight
        reads_embedding = decoder.head is None and self._stage == self._n - 1
        self._is_tied = decoder.head is None and self._embed.requires_grad
        self._copy = self._embed if reads_embedding and self._is_tied else None
        for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers()):
            if self._stage_of[name] != self._stage:
                tensor.requires_grad_(False)
                if not (reads_embedding and tensor is self._embed):
                    tensor.data = tensor.data.new_empty(0)
        self._state_rows: dict[str, _StateRow] = {}
        self._sending: list[tuple[Any, Tensor]] = []
        super().__init__(decoder, dtype, stored, ranks)
        if self._copy is not None:
            self._copy.requires_grad_()

    def is_piece(self, name: str) -> bool:
        return False

    @property
    def group(self) -> Any:
        return self.ranks.mesh.get_group("pipeline")

    def rank_of(self, stage: int) -> int:
        """The rank of this replica that holds ``stage``."""
        return self.ranks.rank - self._stage + stage

    # -- the embedding that is the head ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def accumulate(self) -> None:
        if self._is_tied:
            self._add_up_tied()
        super().accumulate()

    def _add_up_tied(self) -> None:
        """Give the first stage the head's part of a micro-batch's gradient, as one process adds it up: in the leaf's type."""
        if self._copy is not None:
            assert self._copy.grad is not None
            gradient, self._copy.grad = self._copy.grad, None
            gradient = gradient.contiguous()  # sent without waiting: the first stage takes it some micro-batches later
            self._sending.append((dist.isend(gradient, self.rank_of(0), tag=TIED), gradient))
        elif self._stage == 0:
            of_head = torch.empty_like(self._embed)
            dist.recv(of_head, self.rank_of(self._n - 1), tag=TIED)
            self._embed.grad = of_head if self._embed.grad is None else of_head + self._embed.grad

    @torch.no_grad()
    def finish_window(self) -> Tensor:
        while self._sending:
            self._sending.pop()[0].wait()
        return super().finish_window()

    @torch.no_grad()
    def share_working_copy(self) -> None:
        if self._is_tied:
            if self._stage == 0:
                dist.send(self._embed.detach().contiguous(), self.rank_of(self._n - 1), tag=TIED)
            elif self._copy is not None:
                dist.recv(self._copy.detach(), self.rank_of(0), tag=TIED)

    # -- sums over stages -----------------------------------------------------------------------------------------------------

    def _norms(self) -> Tensor:
        """The norm of each gradient of the whole model: of one stage, and zeros of the others, whose sum is exact."""
        own = dict(zip(self.gradients, super()._norms(), strict=True))
        device = self._embed.device
        norms = torch.stack([own.get(name, torch.zeros((), device=device)) for name in self._shapes])
        dist.all_reduce(norms, group=self.group)
        return norms

    # -- whole tensors --------------------------------------------------------------------------------------------------------

    def piece(self, name: str, whole: Tensor, rank: int | None = None) -> Tensor:
        return whole

    def _parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Part]:
        return {
            name: OwnedPart(tensors.get(name), shape, self._stage_of[name], self.stored, self._embed.device)
            for name, shape in self._shapes.items()
        }

    def saw_state(self, state: Mapping[str, Tensor]) -> None:
        """Learn what state the other stages have. All ranks call it together."""
        rows = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        mine = self.ranks.replica * self._n
        found: dict[str, _StateRow] = {}
        for stage, of_stage in enumerate(self.ranks.gathered(rows)[mine : mine + self._n]):
            for name, (shape, dtype) in of_stage.items():
                holders = found[name].holders if name in found else ()
                found[name] = _StateRow((*holders, stage), shape, dtype)
        self._state_rows = found

    def whole_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        parts: dict[str, Tensor | Part] = {}
        for name, row in self._state_rows.items():
            if len(row.holders) == self._n:  # a number of the whole run
                parts[name] = state[name]
            else:
                parts[name] = OwnedPart(state.get(name), row.shape, row.holders[0], row.dtype, self._embed.device)
        return Whole(self.ranks, parts, OPTIMIZER)

    def own_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: value for key, value in state.items() if self._holds(key)}

    def _holds(self, key: str) -> bool:
        """Whether this stage holds state ``key``: of its weights (``<weight>[part]::exp_avg``), of their average
        (``ema::<weight>``) or of the whole run."""
        owner, _, name = key.partition("::")
        weight = next((w for w in (owner.partition("[")[0], name) if w in self._shapes), None)
        return weight is None or self._stage_of[weight] == self._stage
