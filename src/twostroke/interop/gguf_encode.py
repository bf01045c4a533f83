"""Numbers to GGUF's types: the inverse of ``gguf_types``, in pieces and on as many threads as torch has.

Types of one scale a block round as llama.cpp's reference does (``quantize_row_*_ref`` in ggml's ``ggml-quants.c``), to the same
bytes. Of K types, and with a text of all types of four and five bits without a minimum, the scales and minima are searched for:
whole codes are set by trial scales, the scale and the minimum of least weighted squared error follow from the codes, and the
best trial stays. An error weighs as much as llama.cpp lets it weigh: by the mean square of a column's inputs, where that was
measured, and by the size of the number itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from twostroke.core.errors import ConfigError, InputError
from twostroke.model.published.gguf_types import TYPES, TensorType, in_pieces
from twostroke.model.save import is_finite

_PIECE_VALUES = 2**16
"""Numbers that are encoded at once: a quarter of a megabyte, so that the four tensors of a search stay in a core's caches."""

Encoder = Callable[[Tensor, Tensor | None], Tensor]
"""(blocks, numbers) in fp32 and the mean square of each number's input, to (blocks, bytes)."""


def _fp16(values: Tensor) -> Tensor:
    """(n, 1) numbers as (n, 2) bytes. Raises InputError for a number that fp16 does not hold."""
    halves = values.to(torch.float16)
    if not torch.isfinite(halves).all():
        raise InputError(f"a scale of {float(values.abs().max()):.3g} is beyond the largest that fp16 holds, 65504.")
    return halves.contiguous().view(torch.uint8).view(len(values), -1)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 where that is not finite: blocks of zeros and of the smallest numbers."""
    return torch.nan_to_num(torch.ones_like(scales) / scales, nan=0.0, posinf=0.0, neginf=0.0)


def _nibbles(codes: Tensor) -> Tensor:
    """(…, 2, n) codes as (…, n) bytes: the first row in the low nibbles."""
    return codes[..., 0, :] | codes[..., 1, :] << 4


def _bits(codes: Tensor, width: int) -> Tensor:
    """(…, rows, n) codes of ``width`` bits as (…, n) bytes, the first row lowest."""
    result = codes[..., 0, :].clone()
    for i in range(1, codes.shape[-2]):
        result |= codes[..., i, :] << (width * i)
    return result


def _largest(x: Tensor) -> Tensor:
    """(blocks, 1): of each block the first number of the largest size, with its sign."""
    return x.gather(1, x.abs().argmax(dim=1, keepdim=True))


def _q8_0(x: Tensor, importance: Tensor | None) -> Tensor:
    scales = x.abs().amax(dim=1, keepdim=True) / 127
    scaled = x * _inverse(scales)
    codes = torch.where(scaled < 0, torch.ceil(scaled - 0.5), torch.floor(scaled + 0.5))  # halves away from 0
    return torch.cat((_fp16(scales), codes.to(torch.int8).view(torch.uint8)), dim=1)


def _signed(x: Tensor, importance: Tensor | None, half: int) -> tuple[Tensor, Tensor]:
    """Codes 0 to 2·half − 1 around ``half``, and scales: the largest number becomes −half, or of least weighted error."""
    scales = _largest(x) / -half
    if importance is not None:
        scales = _symmetric(_columns(x, 32), _weights(x, importance, 32, 32), half)[:, None]
        return (x * _inverse(scales)).round_().clamp_(-half, half - 1).add_(half).to(torch.uint8), _fp16(scales)
    codes = (x * _inverse(scales) + (half + 0.5)).trunc_().clamp_(0, 2 * half - 1)
    return codes.to(torch.uint8), _fp16(scales)


def _unsigned(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Codes 0 to ``most``; scales and minima."""
    least = x.amin(dim=1, keepdim=True)
    scales = (x.amax(dim=1, keepdim=True) - least) / most
    codes = ((x - least) * _inverse(scales) + 0.5).trunc_().clamp_(0, most)
    return codes.to(torch.uint8), torch.cat((_fp16(scales), _fp16(least)), dim=1)


def _four_bits(codes: Tensor) -> Tensor:
    return _nibbles(codes.view(-1, 2, 16))


def _five_bits(codes: Tensor) -> Tensor:
    fifth = _bits((codes >> 4).view(-1, 4, 8).transpose(1, 2), 1)
    return torch.cat((fifth, _four_bits(codes & 15)), dim=1)


def _q4_0(x: Tensor, importance: Tensor | None) -> Tensor:
    codes, head = _signed(x, importance, 8)
    return torch.cat((head, _four_bits(codes)), dim=1)


def _q4_1(x: Tensor, importance: Tensor | None) -> Tensor:
    codes, head = _unsigned(x, 15)
    return torch.cat((head, _four_bits(codes)), dim=1)


def _q5_0(x: Tensor, importance: Tensor | None) -> Tensor:
    codes, head = _signed(x, importance, 16)
    return torch.cat((head, _five_bits(codes)), dim=1)


def _q5_1(x: Tensor, importance: Tensor | None) -> Tensor:
    codes, head = _unsigned(x, 31)
    return torch.cat((head, _five_bits(codes)), dim=1)


def _columns(x: Tensor, group: int) -> Tensor:
    """(group, groups): a group a column, so that a sum over it adds whole rows."""
    return x.reshape(-1, group).t().contiguous()


_TRIALS = (-1.0, -0.7, -0.4, -0.1, 0.2, 0.5, 0.8)
"""What is added to the largest code to try another scale: with a larger one the largest numbers are cut off."""


def _affine(x: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and minima, (groups,) each, of codes 0 to ``most`` for the columns of ``x``: x ≈ scale·code − minimum, with
    neither below 0. The least of Σ w·(x − scale·code + minimum)² among the trials, and of one more with the best trial's
    scale."""
    least = x.amin(dim=0).clamp_(max=0)
    above = x - least
    span = above.amax(dim=0)
    total, linear = weights.sum(dim=0), (weights * above).sum(dim=0)
    best = torch.zeros_like(span)  # how much the error falls below that of all codes 0: Σ w·above²
    scales, offsets = span / most, torch.zeros_like(span)
    codes, product = torch.empty_like(x), torch.empty_like(x)
    for trial in (*_TRIALS, None):
        if trial is None:
            torch.sub(above, offsets, out=codes)
            codes.mul_(_inverse(scales))
        else:
            torch.mul(above, (most + trial) * _inverse(span), out=codes)
        codes.round_().clamp_(0, most)
        torch.mul(weights, codes, out=product)
        first = product.sum(dim=0)
        second = codes.mul_(product).sum(dim=0)
        mixed = product.mul_(above).sum(dim=0)
        determinant = total * second - first * first
        scale = (total * mixed - linear * first) / determinant
        offset = (second * linear - first * mixed) / determinant
        highest = -least  # the minimum must not fall below 0
        bounded = torch.minimum(offset, highest)
        scale = torch.where(offset > highest, (mixed - bounded * first) / second, scale)
        fall = 2 * (scale * mixed + bounded * linear)
        fall -= scale * scale * second + 2 * scale * bounded * first + bounded * bounded * total
        better = (fall > best) & (scale > 0) & (determinant > 0)
        best = torch.where(better, fall, best)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, bounded, offsets)
    return scales, -(least + offsets)


def _weights(x: Tensor, importance: Tensor | None, group: int, mean_of: int) -> Tensor:
    """(group, groups): how much an error of each number weighs."""
    if importance is None:
        columns = _columns(x, group)
        return columns.abs().add_(columns.square().mean(dim=0).sqrt_())
    spread = 2 * x.view(-1, mean_of).square().mean(dim=1, keepdim=True)
    return _columns((x.view(-1, mean_of).square() + spread).sqrt_().view(x.shape).mul_(importance), group)


_UNIT_TRIALS = (63, 62, 61, 60, 59, 58, 57)


def _wholes(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of ``values``, none below 0, an fp16 unit as (n, 2) bytes, codes of six bits, and unit·code: of the units
    that give the largest value one of ``_UNIT_TRIALS``, each moved to its codes' least squares, that with the least Σ
    w·error²."""
    largest = values.amax(dim=1, keepdim=True)
    best, unit = torch.full_like(largest, -1), largest / 63
    for trial in _UNIT_TRIALS:
        codes = (values * (trial * _inverse(largest))).round_().clamp_(0, 63)
        weighed = weights * codes
        mixed, second = (weighed * values).sum(dim=1, keepdim=True), (weighed * codes).sum(dim=1, keepdim=True)
        fall = mixed * mixed / second
        better = fall > best
        best, unit = torch.where(better, fall, best), torch.where(better, mixed / second, unit)
    head = _fp16(unit)
    unit = head.view(torch.float16).float()
    codes = (values * _inverse(unit)).round_().clamp_(0, 63)
    return head, codes.to(torch.uint8), codes * unit


def _of_minima(x: Tensor, importance: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """Codes (blocks, 8, 32) and the 16 bytes before them, of Q4_K and Q5_K. Minima are fitted again to what became of
    scales."""
    columns, weights = _columns(x, 32), _weights(x, importance, 32, 256)
    scales, minima = _affine(columns, weights, most)
    total = weights.sum(dim=0)
    spread = (columns + minima).square_().mul_(weights).sum(dim=0) * _inverse(scales).square_()  # Σ w·code²
    head, whole, scale = _wholes(scales.view(-1, 8).clamp(min=0), spread.view(-1, 8))
    fitted = scale.view(-1)
    codes = ((columns + minima) * _inverse(fitted)).round_().clamp_(0, most)
    minima = (weights * (codes * fitted - columns)).sum(dim=0) / total.clamp(min=1e-30)
    heads, wholes = [head], [whole]
    head, whole, minimum = _wholes(minima.view(-1, 8).clamp_(min=0), total.view(-1, 8))
    heads.append(head)
    wholes.append(whole)
    codes = ((x.view(-1, 8, 32) + minimum[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, most)
    (low_s, high_s), (low_m, high_m) = ((whole[:, :4], whole[:, 4:]) for whole in wholes)
    packed = (low_s | (high_s >> 4) << 6, low_m | (high_m >> 4) << 6, (high_s & 15) | (high_m & 15) << 4)
    return codes.to(torch.uint8), torch.cat((*heads, *packed), dim=1)


def _q4_k(x: Tensor, importance: Tensor | None) -> Tensor:
    codes, head = _of_minima(x, importance, 15)
    return torch.cat((head, _nibbles(codes.view(-1, 4, 2, 32)).flatten(1)), dim=1)


def _q5_k(x: Tensor, importance: Tensor | None) -> Tensor:
    codes, head = _of_minima(x, importance, 31)
    low = _nibbles((codes & 15).view(-1, 4, 2, 32)).flatten(1)
    return torch.cat((head, _bits(codes >> 4, 1), low), dim=1)


_SIGNED_TRIALS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)


def _symmetric(x: Tensor, weights: Tensor, half: int) -> Tensor:
    """Scales (groups,) of codes −half to half − 1 for the columns of ``x``, of least Σ w·(x − scale·code)²."""
    largest = x.gather(0, x.abs().argmax(dim=0, keepdim=True))[0]
    best, scales = torch.zeros_like(largest), largest / -half
    codes, product = torch.empty_like(x), torch.empty_like(x)
    for trial in (*_SIGNED_TRIALS, None):
        torch.mul(x, _inverse(scales) if trial is None else -(half + trial) * _inverse(largest), out=codes)
        codes.round_().clamp_(-half, half - 1)
        torch.mul(weights, codes, out=product)
        second = codes.mul_(product).sum(dim=0)
        mixed = product.mul_(x).sum(dim=0)
        fall = mixed * mixed / second
        better = (fall > best) & (second > 0)
        best = torch.where(better, fall, best)
        scales = torch.where(better, mixed / second, scales)
    return scales


def _q6_k(x: Tensor, importance: Tensor | None) -> Tensor:
    columns = _columns(x, 16)
    weights = columns.square() if importance is None else _weights(x, importance, 16, 256)
    scales = _symmetric(columns, weights, 32).view(-1, 16)
    head = _fp16(_largest(scales) / -128)
    unit = head.view(torch.float16).float()
    whole = (scales * _inverse(unit)).round_().clamp_(-128, 127)
    codes = (x.view(-1, 16, 16) * _inverse(whole * unit)[..., None]).round_().clamp_(-32, 31).add_(32).to(torch.uint8)
    quarters = codes.view(-1, 2, 4, 32)
    low = _nibbles((quarters & 15).view(-1, 2, 2, 64)).flatten(1)
    return torch.cat((low, _bits(quarters >> 4, 2).flatten(1), whole.to(torch.int8).view(torch.uint8), head), dim=1)


ENCODERS: dict[str, Encoder] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
"""Quantised types that are written."""


def encode(kind: TensorType, values: Tensor, importance: Tensor | None = None) -> np.ndarray:
    """The bytes of ``values``, (rows, columns) or (numbers,), as ``kind``.

    ``importance``, (columns,): the mean square of the inputs that each column is multiplied with, for K types. Works in pieces
    beside the result, as ``dequantise`` does. Raises ConfigError for a type that is not written, InputError for numbers that
    the type's scales do not hold.
    """
    if kind.dtype is not None:
        rounded = values.to(kind.dtype)
        if not is_finite(rounded):
            raise InputError(
                f"a weight of {float(values.abs().max()):.3g} is beyond the largest number that {kind.name} holds."
            )
        return rounded.contiguous().view(torch.uint8).view(-1).numpy()
    if kind.name not in ENCODERS:
        raise ConfigError(f"{kind.name} is read and not written. Written are {', '.join(written_types())}.")
    encoder, width = ENCODERS[kind.name], values.shape[-1]
    blocks = values.reshape(-1, kind.n_values)
    per_row = width // kind.n_values
    every = None
    if importance is not None and bool((importance > 0).any()):
        scaled = importance.float() / importance.float().mean()
        every = scaled.clamp(min=1e-4).view(per_row, kind.n_values)  # a column that the text never used still matters a little
    result = torch.empty((len(blocks), kind.n_bytes), dtype=torch.uint8)
    n = _PIECE_VALUES // kind.n_values

    def piece(first: int) -> None:
        taken = blocks[first : first + n].float()
        weight = None if every is None else every[torch.arange(first, first + len(taken)) % per_row]
        result[first : first + n] = encoder(taken, weight)

    in_pieces(piece, len(blocks), n)
    return result.view(-1).numpy()


SEARCHED = ("Q4_0", "Q5_0")
"""Types whose scales are searched for only if an importance is given."""


def rounding_of(kind: TensorType, weighed: bool) -> str:
    """What calibration calls rounding to ``kind``, ``weighed`` by an importance or not."""
    return f"{kind.name} weighed" if weighed and kind.name in SEARCHED else kind.name


def written_types() -> tuple[str, ...]:
    """The types that are written, by name."""
    return tuple(name for name, kind in TYPES.items() if kind.dtype is not None or name in ENCODERS)
