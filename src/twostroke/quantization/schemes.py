"""The quantised formats there are, and which tensors of a model each touches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from twostroke.core.errors import ConfigError

METHOD = "twostroke"
"""``quantization_config.quant_method`` in a directory that we wrote."""

_BLOCK_MATRIX = re.compile(r"blocks\.\d+\.(attn\.(qkv|out)|mlp\.(gate_up|up|down))\.weight")


@dataclass(frozen=True)
class Scheme:
    """``int8``: symmetric int8 with one fp32 scale an output channel, weight ≈ code·scale, scale = max|channel|/127; products
    with few rows use bf16 activations, those with many quantise each row of activations to 8 bits as well. The embedding, the
    head, norms and biases stay bf16: they are a small part of most models, and the head's errors reach the logits directly."""

    name: str
    weight_bits: int

    def touches(self, canonical: str) -> bool:
        """Whether the canonical tensor is held in this scheme."""
        return _BLOCK_MATRIX.fullmatch(canonical) is not None

    def config(self) -> dict[str, Any]:
        """What goes into ``config.json`` as ``quantization_config``."""
        return {
            "quant_method": METHOD,
            "scheme": self.name,
            "weight_bits": self.weight_bits,
            "symmetric": True,
            "granularity": "output channel",
        }


SCHEMES: dict[str, Scheme] = {"int8": Scheme("int8", 8)}


def scheme_of(name: str) -> Scheme:
    """The scheme called ``name``; ConfigError for another."""
    if name not in SCHEMES:
        raise ConfigError(f"scheme={name!r} is not a way to quantise. Use one of {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def scale_name(weight: str) -> str:
    """Name of a stored weight's scales: ``….q_proj.weight`` → ``….q_proj.weight_scale``, as compressed-tensors has it."""
    return f"{weight}_scale"
