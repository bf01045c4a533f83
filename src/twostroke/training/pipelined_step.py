"""The step of a run whose replicas are pipelines: one forward, one backward in turn (1F1B).

Stage s of P computes P − 1 − s micro-batches ahead of their backward passes, so it keeps the activations of P − s at most
(Narayanan et al. 2019, PipeDream; 2021, arXiv:2104.04473, section 2.2). Backward passes come in the order of the micro-batches'
numbers on every stage, so gradients are added as one process adds them, and to the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.data.loader import Batch
from twostroke.model.adapters import LowRank
from twostroke.training.clock import StepClock
from twostroke.training.pipeline_masters import BACKWARD, FORWARD, GENERATOR, PipelineMasters
from twostroke.training.ranked_step import RankedStep
from twostroke.training.ranks import SENT, Ranks
from twostroke.training.stages import layers_of

MOST_SENDING = 8
"""Messages that a stage holds until the others have taken them."""


class PipelinedStep(RankedStep):
    """Passes of one stage. Residual streams, and with dropout the state of the random generator, come from the stage before."""

    masters: PipelineMasters

    def __init__(self, ranks: Ranks, *arguments: Any, **settings: Any) -> None:
        super().__init__(ranks, *arguments, **settings)
        self._stage, self._n = ranks.pipeline, ranks.layout.pipeline
        spec = self.decoder.spec
        self._layers = layers_of(self._stage, self._n, spec.n_layers)
        self._draws = spec.dropout > 0 or any(isinstance(m, LowRank) and m.dropout > 0 for m in self.decoder.modules())
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def _passes(
        self, batches: Sequence[Batch], seeds: Sequence[int], scale: float, clock: StepClock, abandon: Callable[[], bool]
    ) -> list[Tensor]:
        ahead = min(self._n - 1 - self._stage, len(batches))
        under_way: deque[tuple[Tensor | None, Tensor, Tensor]] = deque()
        losses = []
        for i in range(len(batches) + ahead):
            self.ranks.progress.again()
            if i < len(batches):
                under_way.append(self._forward(batches[i], seeds[i], clock))
            if i >= ahead:
                losses.append(self._backward(*under_way.popleft(), scale, clock))
        while self._sending:
            self._sending.popleft()[0].wait()
        return losses

    def _forward(self, batch: Batch, seed: int, clock: StepClock) -> tuple[Tensor | None, Tensor, Tensor]:
        """(what came from the stage before, what this stage made of it, the micro-batch's loss): on the last stage what is
        trained, and on others the residual stream and no loss."""
        batch = batch.to(self.device, non_blocking=True)
        received: Tensor | None = None
        if self._stage == 0:
            torch.manual_seed(seed)
            residual = self.decoder.entered(batch.tokens, batch.positions)
        else:
            shape = (*batch.tokens.shape, self.decoder.spec.d_model)
            residual = received = torch.empty(shape, dtype=self.masters.dtype, device=self.device)
            dist.recv(received, self.masters.rank_of(self._stage - 1), tag=FORWARD)
            received.requires_grad_()
            if self._draws:
                state = torch.empty_like(_generator_state(self.device))
                dist.recv(state, self.masters.rank_of(self._stage - 1), tag=GENERATOR)
                _set_generator_state(self.device, state)
        made = self.decoder.through(residual, batch.positions, batch.documents, self._layers)
        if self._stage == self._n - 1:
            clock.lap("forward")
            trained, loss = self._loss_of(self.decoder.read_out(made).flatten(0, 1), batch.targets.flatten(), clock.lap)
            return received, trained, loss.detach()
        self._send(made.detach(), self._stage + 1, FORWARD)
        if self._draws:
            self._send(_generator_state(self.device), self._stage + 1, GENERATOR)
        clock.lap("forward")
        return received, made, torch.zeros((), device=self.device)

    def _backward(self, received: Tensor | None, made: Tensor, loss: Tensor, scale: float, clock: StepClock) -> Tensor:
        if self._stage == self._n - 1:
            (made * scale).backward()
        else:
            gradient = torch.empty_like(made)
            dist.recv(gradient, self.masters.rank_of(self._stage + 1), tag=BACKWARD)
            made.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self._stage - 1, BACKWARD)
        clock.lap("backward")
        self.masters.accumulate()
        clock.lap("optimizer")
        return loss

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        """Send without waiting, but for what was sent ``MOST_SENDING`` messages ago: the other stage may be at a message of its
        own."""
        if len(self._sending) == MOST_SENDING:
            self._sending.popleft()[0].wait()
        tensor = tensor.contiguous()
        SENT["pipeline"] += tensor.numel() * tensor.element_size()
        self._sending.append((dist.isend(tensor, self.masters.rank_of(stage), tag=tag), tensor))


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
