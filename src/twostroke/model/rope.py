"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotating halves as Hugging Face checkpoints expect."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.spec import ModelSpec

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def inverse_frequencies(spec: ModelSpec, device: torch.device | None = None) -> Float[Tensor, " half_D"]:
    """θ^(−2i/D) for i < D/2, in radians per position, after ``spec.rope``'s scaling; fp32.

    The arithmetic is fp32 on purpose, in the order of transformers. At position 10⁴ one unit in the last place of a frequency
    is 10⁻³ radians, so a more exact table would differ from the one that the weights were trained with.
    """
    rope, head_dim = spec.rope, spec.head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low_wavelength = rope.original_max_positions / rope.low_freq_factor
        high_wavelength = rope.original_max_positions / rope.high_freq_factor
        scaled = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
        blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - blend) * scaled / rope.factor + blend * scaled
        between = (wavelengths <= low_wavelength) & (wavelengths >= high_wavelength)
        return torch.where(between, blended, scaled)
    return frequencies


def rope_tables(
    spec: ModelSpec, positions: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T half_D"], Float[Tensor, "B T half_D"]]:
    """cos and sin of position·frequency, fp32, for one half of the head dimension; the other half has the same."""
    angles = positions[..., None].float() * inverse_frequencies(spec, positions.device)
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "B T N D"], cos: Float[Tensor, "#B T half_D"], sin: Float[Tensor, "#B T half_D"]) -> Tensor:
    """``x`` rotated by its position: (a, b) → (a·cos − b·sin, b·cos + a·sin) with the halves a and b of the head dimension.

    The fp32 tables promote a bf16 ``x`` to fp32, so it is rounded once, at the end.
    """
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # (B, T, 1, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
