"""Feed-forward layers: SwiGLU with a packed gate and up projection, and the plain two-matrix form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.core.matrices import block_matrices
from twostroke.core.spec import ModelSpec

if TYPE_CHECKING:
    from jaxtyping import Float


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _clamped_swish(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=SWISH_LIMIT)
    return gate * torch.sigmoid(SWISH_SLOPE * gate) * (up.clamp(-SWISH_LIMIT, SWISH_LIMIT) + 1.0)


SWISH_LIMIT, SWISH_SLOPE = 7.0, 1.702
"""Of ``clamped_swish`` (gpt-oss's model card, August 2025)."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}


def gated(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(gate, up) → activation(gate)·up."""
    if name == "clamped_swish":
        return _clamped_swish
    activation = ACTIVATIONS[name]
    return lambda gate, up: activation(gate) * up


class GatedMlp(nn.Module):
    """down(activation(gate(normed)) · up(normed)). Gate and up are one matrix of 2F rows, gate first, so that its input is read
    once."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = gated(spec.activation)
        *_, up, down = block_matrices(spec)
        self.gate_up = nn.Linear(up.k, up.n, bias=up.bias)
        self.down = nn.Linear(down.k, down.n, bias=down.bias)

    def forward(self, normed: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        out: Tensor = self.down(self.inner(normed))
        return out

    def inner(self, normed: Float[Tensor, "B T E"]) -> Float[Tensor, "B T F"]:
        """What the last matrix reads."""
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.activation(gate, up)


class PlainMlp(nn.Module):
    """down(activation(up(normed)))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        *_, up, down = block_matrices(spec)
        self.up = nn.Linear(up.k, up.n, bias=up.bias)
        self.down = nn.Linear(down.k, down.n, bias=down.bias)

    def forward(self, normed: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        out: Tensor = self.down(self.inner(normed))
        return out

    def inner(self, normed: Float[Tensor, "B T E"]) -> Float[Tensor, "B T F"]:
        """What the last matrix reads."""
        return self.activation(self.up(normed))
