"""An embedding that is the head as well, where stages of a pipeline are on ranks of their own.

The first stage has the master, and the last stage computes with a copy. Its gradient goes to the first stage, once a
micro-batch, and is added there as one process adds it: in the type of the computation, to that of the embedding. After an
update the new weight comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twostroke.model.decoder import Decoder
from twostroke.training.exchanges import SENT, gathered
from twostroke.training.holding import Holding
from twostroke.training.ranks import Ranks
from twostroke.training.stages import EMBEDDING

TIED = 4
"""The tag of its messages, beside those of ``training.pipelined_step``."""


class TiedHead:
    """Either end's part in it."""

    def __init__(self, copy: nn.Parameter | None, holding: Holding, dtype: torch.dtype, ranks: Ranks) -> None:
        self._copy, self._holding, self._dtype, self._ranks = copy, holding, dtype, ranks
        last = ranks.size("pipeline") - 1
        self._other = ranks.neighbour("pipeline", 0 if copy is not None else last)
        self._sending: list[tuple[Any, Tensor]] = []

    @classmethod
    def of(cls, decoder: Decoder, holdings: Mapping[str, Holding], dtype: torch.dtype, ranks: Ranks) -> TiedHead | None:
        """That of this rank; None in the middle, without a pipeline, and without a tied head that is trained."""
        stage, n = ranks.at("pipeline"), ranks.size("pipeline")
        if n == 1 or decoder.head is not None or EMBEDDING not in holdings or 0 < stage < n - 1:
            return None
        copy = decoder.embed.weight if stage else None
        if copy is not None:
            copy.requires_grad_()
        return cls(copy, holdings[EMBEDDING], dtype, ranks)

    def joined(self, made: Tensor, weight: Tensor) -> Tensor:
        """``made`` by the first stage, whose backward pass hands ``weight`` the head's gradient too."""
        found: Tensor = _HeadGradient.apply(made, weight, self._other) if self._copy is None else made
        return found

    def send_gradient(self) -> None:
        """Send what a backward pass left in the copy, without waiting: the first stage takes it some micro-batches later."""
        if self._copy is None:
            return
        assert self._copy.grad is not None
        gradient, self._copy.grad = self._copy.grad.contiguous(), None
        SENT["pipeline"] += gradient.numel() * gradient.element_size()
        self._sending.append((dist.isend(gradient, self._other, tag=TIED), gradient))

    def wait(self) -> None:
        """Wait until all gradients are taken."""
        while self._sending:
            self._sending.pop()[0].wait()

    @torch.no_grad()
    def renew(self, held: Tensor | None) -> None:
        """Hand over ``held``, what each of the first stage's ranks has of the weight."""
        rows = self._holding.rows
        if self._copy is None:
            assert held is not None
            sent = held.detach().to(self._dtype).contiguous()
            SENT["pipeline"] += sent.numel() * sent.element_size()
            if sent.numel():
                dist.send(sent, self._other, tag=TIED)
            return
        own = {axis: self._ranks.at(axis) for axis in self._holding.axes}
        held = torch.empty(self._holding.shape_of(self._ranks, own), dtype=self._dtype, device=self._copy.device)
        if held.numel():
            dist.recv(held, self._other, tag=TIED)
        if rows:
            n_rows, width = self._copy.shape
            most = -(-n_rows // self._ranks.size(*rows)) * width
            padded = nn.functional.pad(held.flatten(), (0, most - held.numel()))
            held = gathered(padded, self._ranks.group(*rows), "data").view(-1, width)[:n_rows]
        self._copy.copy_(held)


class _HeadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, weight: Tensor, sender: int) -> Tensor:
        ctx.sender, ctx.like = sender, (weight.shape, weight.dtype, weight.device)
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        of_head = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(of_head, ctx.sender, tag=TIED)
        return upstream[0], of_head, None
