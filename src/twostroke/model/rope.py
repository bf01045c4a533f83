"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotating halves as most Hugging Face checkpoints expect.

A model that turns neighbours, or only the leading dimensions of a head, is brought to halves of the whole head by
``by_halves``: what is not turned has an angle of 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from twostroke.core.spec import ModelSpec, RopeSpec

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Angles(NamedTuple):
    """Of each angle of a head: ``frequencies`` in radians per position, and what its sine and cosine are multiplied with."""

    frequencies: Float[Tensor, " half_D"]
    magnitudes: Float[Tensor, " half_D"]


def angles(spec: ModelSpec, rope: RopeSpec, length: int = 0, device: torch.device | None = None) -> Angles:
    """The angles of ``rope`` for sequences of ``length`` tokens (0: of the model's usual length), fp32; 0 for what is not
    turned."""
    turned = inverse_frequencies(rope, spec.rotary_dim, length, spec.max_positions, device)
    still = (spec.head_dim - spec.rotary_dim) // 2
    magnitudes = torch.full_like(turned, rope.magnitude)
    return Angles(torch.cat((turned, turned.new_zeros(still))), torch.cat((magnitudes, magnitudes.new_ones(still))))


def inverse_frequencies(
    rope: RopeSpec, dim: int, length: int = 0, max_positions: int = 0, device: torch.device | None = None
) -> Float[Tensor, " half_dim"]:
    """θ^(−2i/dim) for i < dim/2, in radians per position, after ``rope``'s scaling for sequences of ``length``; fp32.

    The arithmetic is fp32 on purpose, in the order of transformers. At position 10⁴ one unit in the last place of a frequency
    is 10⁻³ radians, so a more exact table would differ from the one that the weights were trained with.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    theta = rope.theta
    if rope.scaling == "dynamic" and max_positions:
        theta *= (rope.factor * max(length, max_positions) / max_positions - (rope.factor - 1)) ** (dim / (dim - 2))
    powers = theta**exponents
    if rope.scaling == "longrope":
        divisors = rope.long_factors if length > rope.original_max_positions else rope.short_factors
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device=device) * powers)
    frequencies = 1.0 / powers
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "proportional":
        n_turned = int(rope.turned_share * dim // 2)
        return torch.where(torch.arange(dim // 2, device=device) < n_turned, frequencies, 0.0) / rope.factor
    if rope.scaling == "yarn":
        return _yarn(rope, dim, powers, frequencies)
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    scaled = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    between = (wavelengths <= low_wavelength) & (wavelengths >= high_wavelength)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeSpec, dim: int, powers: Tensor, frequencies: Tensor) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn seldom are divided by the factor, between them a ramp
    (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """The one that turns so often in the original length."""
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=powers.device) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + frequencies * kept


def rope_tables(
    spec: ModelSpec, positions: Int[Tensor, "B T"], rope: RopeSpec | None = None
) -> tuple[Float[Tensor, "B T half_D"], Float[Tensor, "B T half_D"]]:
    """cos and sin of position·frequency, fp32, for one half of the head dimension; the other half has the same."""
    rope = rope or spec.rope
    length = int(positions.max()) + 1 if rope.scaling in ("longrope", "dynamic") else 0
    frequencies, magnitudes = angles(spec, rope, length, positions.device)
    turned = positions[..., None].float() * frequencies
    if rope.magnitude == 1.0:
        return turned.cos(), turned.sin()
    return turned.cos() * magnitudes, turned.sin() * magnitudes


def tables_by_layer(spec: ModelSpec, positions: Int[Tensor, "B T"]) -> list[tuple[Tensor, Tensor] | None]:
    """``rope_tables`` for each layer, None where it has no positions to turn by. Layers with the same angles share one."""
    ropes = [spec.rope_of_layer(i) for i in range(spec.n_layers)]
    tables = {rope: None if rope is None else rope_tables(spec, positions, rope) for rope in set(ropes)}
    return [tables[rope] for rope in ropes]


def turned_by_halves(spec: ModelSpec) -> bool:
    """Whether heads are stored as ``rotate`` turns them: all dimensions, one number of each half together."""
    return spec.rotary_dim == spec.head_dim and not spec.departures.neighbours_turn


def by_halves(x: Float[Tensor, "*rows D"], spec: ModelSpec) -> Float[Tensor, "*rows D"]:
    """``x`` with the two numbers of each angle at i and i + D/2, the turned ones first in each half. Queries and keys are
    reordered alike, so their products stay what they are."""
    n = spec.rotary_dim
    if spec.departures.neighbours_turn:
        first, second = x[..., 0:n:2], x[..., 1:n:2]
    else:
        first, second = x[..., : n // 2], x[..., n // 2 : n]
    middle = n + (spec.head_dim - n) // 2
    return torch.cat((first, x[..., n:middle], second, x[..., middle:]), dim=-1)


def rotate(x: Float[Tensor, "B T N D"], cos: Float[Tensor, "#B T half_D"], sin: Float[Tensor, "#B T half_D"]) -> Tensor:
    """``x`` rotated by its position: (a, b) → (a·cos − b·sin, b·cos + a·sin) with the halves a and b of the head dimension.

    The fp32 tables promote a bf16 ``x`` to fp32, so it is rounded once, at the end.
    """
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # (B, T, 1, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
