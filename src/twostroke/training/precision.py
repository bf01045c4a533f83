"""Mixed precision: fp32 master weights that the optimizer updates, beside the working copy that computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MasterWeights:
    """The authoritative fp32 weights of a decoder, their fp32 gradients, and the link to the decoder's own parameters.

    With bf16 compute the decoder holds a rounded copy: one bf16 unit in the last place is 2⁻⁸ of a value, so an update of
    10⁻³ of it would vanish if it were added there. With fp32 compute the decoder's parameters *are* the masters, without a
    copy.

    Memory of N parameters, in bytes: bf16 2N working + 4N masters + 4N gradients, and 2N for the backward pass's own
    gradients until ``collect`` took them; fp32 4N + 4N.
    """

    def __init__(self, decoder: nn.Module, dtype: torch.dtype) -> None:
        """Take over ``decoder``, whose trained parameters must be fp32, and leave it computing in ``dtype``.

        Frozen parameters have no master and no gradient; they are rounded to ``dtype`` for good. Buffers stay as they are.
        """
        self.weights: dict[str, Tensor] = {name: p.detach() for name, p in decoder.named_parameters() if p.requires_grad}
        wrong = [name for name, weight in self.weights.items() if weight.dtype != torch.float32]
        if wrong:
            raise TypeError(f"{wrong[0]} is {self.weights[wrong[0]].dtype}; masters are taken from fp32 parameters")
        for parameter in decoder.parameters():
            parameter.data = parameter.data.to(dtype)
        self._parameters = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
        frozen = [p for p in decoder.parameters() if not p.requires_grad]
        self.frozen_bytes = sum(t.numel() * t.element_size() for t in (*frozen, *decoder.buffers()))
        self.has_working_copy = dtype != torch.float32
        self.gradients = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._is_first = True
        self.zero_gradients()

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Forget all gradients: the start of an accumulation window."""
        self._is_first = True
        if self.has_working_copy:
            for parameter in self._parameters.values():
                parameter.grad = None
        else:
            torch._foreach_zero_(list(self.gradients.values()))
            for name, parameter in self._parameters.items():
                parameter.grad = self.gradients[name]  # autograd adds into it

    @torch.no_grad()
    def collect(self) -> None:
        """Add the backward pass's gradients to the fp32 ones. Summing micro-batches in bf16 would lose the small ones."""
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
    def publish(self) -> None:
        """Round the masters into the working copy, after they changed."""
        if self.has_working_copy:
            torch._foreach_copy_([p.detach() for p in self._parameters.values()], list(self.weights.values()))

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Replace all masters by ``weights``, of the same names and shapes, and publish them."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])
        self.publish()

    @property
    def weights_bytes(self) -> int:
        """Masters and working copy, and what is frozen beside them."""
        n_parameters = sum(w.numel() for w in self.weights.values())
        working = next(iter(self._parameters.values())).element_size() if self.has_working_copy else 0
        return n_parameters * (4 + working) + self.frozen_bytes

    @property
    def gradients_bytes(self) -> int:
        """fp32 gradients, and with a working copy the backward pass's own, which live beside them at the end of a step."""
        n_parameters = sum(w.numel() for w in self.weights.values())
        working = next(iter(self._parameters.values())).element_size() if self.has_working_copy else 0
        return n_parameters * (4 + working)
