"""Initialises weights. A seed gives the same weights on every device and in every dtype."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

EMBEDDING_STD = 0.02
RESIDUAL_OUTPUTS = (".attn.out.weight", ".mlp.down.weight", ".mlp.expert_down.weight", ".mlp.shared_down.weight")
ZERO_AT_FIRST = (".bias", ".sinks")


def parameter_std(name: str, shape: torch.Size, n_layers: int) -> float:
    """Standard deviation of a matrix's initial values: 0.02 for embeddings and head, 1/√fan_in for the others.

    Matrices that write to the residual stream are also scaled by 1/√(2L), so that its variance after L blocks does not grow
    with L (GPT-2, Radford et al. 2019).
    """
    if name in ("embed.weight", "position_embed.weight", "head.weight"):
        return EMBEDDING_STD
    std = 1 / math.sqrt(shape[1])
    return std / math.sqrt(2 * n_layers) if name.endswith(RESIDUAL_OUTPUTS) else std


@torch.no_grad()
def initialise(decoder: nn.Module, seed: int) -> None:
    """Fill ``decoder`` in place: matrices from a normal distribution (``parameter_std``), biases, attention sinks and buffers
    with 0, norm weights with 1, or with 0 where 1 is added to them.

    Each parameter has a generator seeded by (seed, its name) and draws in fp32 on the CPU. So its values depend neither on the
    order of construction nor on the device or the dtype.
    """
    n_layers = sum(1 for _ in decoder.get_submodule("blocks").children())
    offsets = {name: getattr(module, "offset", 0.0) for name, module in decoder.named_modules()}
    for name, parameter in decoder.named_parameters():
        if name.endswith(ZERO_AT_FIRST):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0 - offsets[name.rpartition(".")[0]])
        else:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            std = parameter_std(name, parameter.shape, n_layers)
            fresh = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            parameter.copy_(fresh)
    for buffer in decoder.buffers():
        buffer.zero_()
