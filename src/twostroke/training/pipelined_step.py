"""The step of a run whose replicas are pipelines, in the order of ``training.stages.turns``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.data.loader import Batch
from twostroke.model.adapters import LowRank
from twostroke.training.clock import StepClock
from twostroke.training.exchanges import SENT
from twostroke.training.ranked_masters import DividedMasters
from twostroke.training.ranked_step import RankedStep
from twostroke.training.ranks import Ranks
from twostroke.training.stages import most_sending, own_layers, turns

FORWARD, BACKWARD, GENERATOR = 1, 2, 3
"""Tags of what stages send each other: residual streams, their gradients, states of random generators."""


class _Pass(NamedTuple):
    """A forward pass of a stage: its micro-batch, what came from the stage before, and what this one made of it: on the last
    stage what is trained, with the micro-batch's loss, on others the residual stream."""

    batch: Batch
    received: Tensor | None
    made: Tensor
    loss: Tensor


class PipelinedStep(RankedStep):
    """Passes of one stage's chunks. Residual streams, and with dropout the state of the random generator, come from the stage
    before."""

    masters: DividedMasters

    def __init__(self, ranks: Ranks, *arguments: Any, **settings: Any) -> None:
        super().__init__(ranks, *arguments, **settings)
        self._stage, self._n = ranks.at("pipeline"), ranks.size("pipeline")
        spec = self.decoder.spec
        self._layers = own_layers(self.decoder, ranks)
        self._draws = spec.dropout > 0 or any(isinstance(m, LowRank) and m.dropout > 0 for m in self.decoder.modules())
        self._sending: deque[tuple[Any, Tensor]] = deque()
        # Those that a stage can be ahead of the next one, and some more. Proved by tests/training/test_pipeline.py.
        self._most_sending = most_sending(self._n, len(self._layers))

    def _passes(
        self, batches: Sequence[Batch], seeds: Sequence[int], scale: float, clock: StepClock, abandon: Callable[[], bool]
    ) -> list[Tensor]:
        under_way: dict[tuple[int, int], _Pass] = {}
        losses = [torch.zeros((), device=self.device) for _ in batches]
        if self.experts is not None:
            self.experts.set_scale(scale)  # once, because several passes that read it wait for their backward passes
        for is_forward, number, i in turns(self._stage, self._n, len(self._layers), len(batches)):
            self.ranks.progress.again()
            if is_forward:
                under_way[number, i] = self._forward(number, batches[i], seeds[i], clock)
                losses[i] = under_way[number, i].loss
            else:
                self._backward(number, under_way.pop((number, i)), scale, clock)
        while self._sending:
            self._sending.popleft()[0].wait()
        return losses

    def _begins(self, number: int) -> bool:
        """Whether the stage's ``number``-th chunk is the model's first one."""
        return self._stage == 0 and number == 0

    def _ends(self, number: int) -> bool:
        return self._stage == self._n - 1 and number == len(self._layers) - 1

    def _forward(self, number: int, batch: Batch, seed: int, clock: StepClock) -> _Pass:
        own = batch if self.ring is None else self.ring.begin(batch)
        own = own.to(self.device, non_blocking=True)
        received: Tensor | None = None
        if self._begins(number):
            torch.manual_seed(seed)
        else:
            rows, tokens = own.tokens.shape
            shape = (rows, tokens // self.ranks.size("tensor"), self.decoder.spec.d_model)
            received = torch.empty(shape, dtype=self.masters.dtype, device=self.device)
            dist.recv(received, self._beside(-1), tag=FORWARD)
            received.requires_grad_()
            if self._draws:
                state = torch.empty_like(_generator_state(self.device))
                dist.recv(state, self._beside(-1), tag=GENERATOR)
                _set_generator_state(self.device, state)
        begun = own.tokens if received is None else received
        made = self.decoder.stage(begun, own.positions, own.documents, self._layers[number])
        loss = torch.zeros((), device=self.device)
        if self._begins(number) and self.masters.tied is not None:
            made = self.masters.tied.joined(made, self.decoder.embed.weight)
        if self._ends(number):
            clock.lap("forward")
            made, loss = self._loss_of(made.flatten(0, 1), own.targets.flatten(), clock.lap)
        else:
            self._send(made.detach(), 1, FORWARD)
            if self._draws:
                self._send(_generator_state(self.device), 1, GENERATOR)
            clock.lap("forward")
        return _Pass(batch, received, made, loss.detach())

    def _backward(self, number: int, done: _Pass, scale: float, clock: StepClock) -> None:
        if self.ring is not None:
            self.ring.begin(done.batch)  # what is computed again attends as it did
        if self._ends(number):
            (done.made * scale).backward()
        else:
            gradient = torch.empty_like(done.made)
            dist.recv(gradient, self._beside(1), tag=BACKWARD)
            done.made.backward(gradient)
        if self.ring is not None:
            self.ring.end()
        if done.received is not None:
            assert done.received.grad is not None
            self._send(done.received.grad, -1, BACKWARD)
        clock.lap("backward")
        if self._ends(number) and self.masters.tied is not None:
            self.masters.tied.send_gradient()
        self.masters.accumulate(number)
        clock.lap("optimizer")

    def _beside(self, step: int) -> int:
        """The rank of the stage before (−1) or after (1) this one; chunks go round."""
        return self.ranks.neighbour("pipeline", (self._stage + step) % self._n)

    def _send(self, tensor: Tensor, step: int, tag: int) -> None:
        """Send to ``_beside`` without waiting, but for what was sent many messages ago: the other stage may be at a message of
        its own."""
        if len(self._sending) == self._most_sending:
            self._sending.popleft()[0].wait()
        tensor = tensor.contiguous()
        SENT["pipeline"] += tensor.numel() * tensor.element_size()
        self._sending.append((dist.isend(tensor, self._beside(step), tag=tag), tensor))


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
