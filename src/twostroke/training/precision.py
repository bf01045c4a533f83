"""The precision of a run: fp32, bf16 or fp16 computation beside fp32 master weights, or bf16 alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

COMPUTED_AND_STORED: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
    "pure_bf16": (torch.bfloat16, torch.bfloat16),
}
"""By ``train.dtype``: the type of forward and backward, and that of the weights the optimizer updates and of their gradients.

bf16 and fp16 are mixed precision (Micikevicius et al. 2017, arXiv:1710.03740); fp16 needs ``training.loss_scale`` beside it,
pure bf16 ``training.stochastic_rounding``."""


class MasterWeights:
    """The authoritative weights of a decoder, their gradients, and the link to the decoder's own parameters.

    If the compute type differs from the stored one, the decoder holds a rounded copy of fp32 masters: one bf16 unit in the last
    place is 2⁻⁸ of a value, so adding an update of 10⁻³ of the value to bf16 would change nothing. If the types are the same,
    the decoder's parameters *are* the masters.

    Memory of N parameters, in bytes: bf16 and fp16 take 2N working copy + 4N masters + 4N gradients, and 2N for the backward
    pass's own gradients until ``accumulate`` adds them up; fp32 takes 4N + 4N; pure bf16 takes 2N + 2N.
    """

    is_sharded = False
    """Whether ``weights`` and ``gradients`` are this rank's rows only (``training.ranked_masters``)."""

    def __init__(self, decoder: nn.Module, dtype: torch.dtype, stored: torch.dtype = torch.float32) -> None:
        """Make masters of ``decoder``'s trained parameters, which must be fp32, and let the decoder compute in ``dtype``.

        Frozen parameters get neither master nor gradient, and are rounded to ``dtype`` permanently. Buffers stay as they are.
        """
        trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if parameter.dtype != torch.float32:
                raise TypeError(f"{name} is {parameter.dtype}; masters are made from fp32 parameters")
        self.weights: dict[str, Tensor] = {name: p.detach().to(stored) for name, p in trained.items()}
        for parameter in decoder.parameters():
            if not parameter.requires_grad or dtype != stored:
                parameter.data = parameter.data.to(dtype)
        if dtype == stored:
            for name, parameter in trained.items():
                parameter.data = self.weights[name]
        self._parameters = trained
        frozen = [p for p in decoder.parameters() if not p.requires_grad]
        self.frozen_bytes = sum(t.numel() * t.element_size() for t in (*frozen, *decoder.buffers()))
        self.dtype, self.stored = dtype, stored
        self.has_working_copy = dtype != stored
        self.gradients = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._is_first = True
        self.zero_gradients()

    @classmethod
    def of(cls, decoder: nn.Module, dtype: str) -> MasterWeights:
        """The masters of a run with ``train.dtype`` = ``dtype``."""
        return cls(decoder, *COMPUTED_AND_STORED[dtype])

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The decoder's trained parameters: the working copy, or the masters themselves."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Set all gradients to zero, at the start of an accumulation window."""
        self._is_first = True
        if self.has_working_copy:
            for parameter in self._parameters.values():
                parameter.grad = None
        else:
            torch._foreach_zero_(list(self.gradients.values()))
            for name, parameter in self._parameters.items():
                parameter.grad = self.gradients[name]  # autograd adds into it

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the backward pass's gradients to the fp32 ones. A bf16 sum over micro-batches would lose small gradients."""
        if not self.has_working_copy:
            return
        fresh = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if self._is_first and len(fresh) < len(self.gradients):
            torch._foreach_zero_([g for name, g in self.gradients.items() if name not in fresh])
        targets = [self.gradients[name] for name in fresh]
        add = torch._foreach_copy_ if self._is_first else torch._foreach_add_
        add(targets, list(fresh.values()))
        self._is_first = False
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def finish_window(self) -> Tensor:
        """The norm of each gradient, at the end of an accumulation window."""
        return torch.stack(torch._foreach_norm(list(self.gradients.values()), 2, torch.float32))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole masters."""
        return {name: tuple(weight.shape) for name, weight in self.weights.items()}

    def whole(self, extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The whole masters by name, and ``extra``."""
        return self.weights | dict(extra)

    def whole_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """The optimizer's ``state`` with whole tensors, as checkpoints hold it."""
        return state

    def whole_average(self, averages: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The whole ``averages`` of the masters by name, and ``extra``."""
        return dict(averages) | dict(extra)

    def saw_state(self, state: Mapping[str, Any]) -> None:
        """The optimizer has made or read its ``state``, on all ranks."""

    def own_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What this process keeps of a checkpoint's ``state``, which is what ``whole_state`` returned."""
        return state

    def counts(self, name: str) -> bool:
        """Whether sums over the ranks of a replica count what this one holds of master ``name``, which others may hold too."""
        return True

    def drop_gathered(self) -> None:
        """Drop what a forward pass without a backward pass has gathered of other ranks' weights."""

    def norm_to_clip(self, norm: float) -> float:
        """The norm by which this process clips its gradients, where all ranks agreed on ``norm``."""
        return norm

    def took_step(self) -> None:
        """Follow an update that the optimizer has just made."""
        self.update_working_copy()

    def finish_run(self) -> None:
        """Exchange what other ranks do not have yet, after the last step."""

    @torch.no_grad()
    def update_working_copy(self) -> None:
        """Round the masters into the working copy after an update."""
        if self.has_working_copy:
            torch._foreach_copy_(list(self.parameters.values()), list(self.weights.values()))
        self.share_working_copy()

    def share_working_copy(self) -> None:
        """Give other ranks what they compute with of this one's working copy."""

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all masters by ``weights``, of the same names and shapes, and update the working copy."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])
        self.update_working_copy()

    @property
    def exchange_bytes(self) -> int:
        """Bytes of what is kept for exchanges with other ranks."""
        return 0

    @property
    def _bytes_per_parameter(self) -> int:
        return self.stored.itemsize + (self.dtype.itemsize if self.has_working_copy else 0)

    @property
    def weights_bytes(self) -> int:
        """Bytes of masters, working copy, frozen parameters and buffers."""
        return sum(w.numel() for w in self.weights.values()) * self._bytes_per_parameter + self.frozen_bytes

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients that the optimizer reads and, with a working copy, of the backward pass's own gradients, which
        exist beside them at the end of a step."""
        return sum(w.numel() for w in self.weights.values()) * self._bytes_per_parameter
