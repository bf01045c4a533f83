from __future__ import annotations

import pytest
import torch

from twostroke.core.errors import ConfigError
from twostroke.kernels.int4 import GROUPS, dequantize_groups, quantize_groups


def weights(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("k", [1, 31, 64, 200])
def test_codes_stand_for_the_weights_within_a_step(group: int, k: int) -> None:
    w = weights(7, k)
    codes, scales, zeros = quantize_groups(w, group, searched=False)
    assert codes.shape == w.shape
    assert scales.shape == zeros.shape == (7, -(-k // group))
    assert int(codes.max()) <= 15
    assert int(zeros.max()) <= 15
    step = scales.repeat_interleave(group, dim=1)[:, :k]
    # half a step for the code, half for the zero point, and what rounding the scale to 11 bits moves the ends
    assert bool(((dequantize_groups(codes, scales, zeros, group) - w).abs() <= step * 1.01).all())


@pytest.mark.parametrize("group", GROUPS)
def test_narrower_ranges_lower_the_error(group: int) -> None:
    w = weights(64, 512)
    errors = [
        float((dequantize_groups(*quantize_groups(w, group, searched), group) - w).square().mean())
        for searched in (False, True)
    ]
    assert errors[1] < 0.96 * errors[0]


def test_zero_is_exact_whatever_its_group_holds() -> None:
    w = weights(4, 64).abs() + 1.0
    w[:, ::5] = 0.0
    back = dequantize_groups(*quantize_groups(w, 32), 32)
    assert bool((back[:, ::5] == 0).all())
    assert bool((dequantize_groups(*quantize_groups(torch.zeros(3, 40), 32), 32) == 0).all())


def test_scales_hold_no_more_than_the_packed_form() -> None:
    mantissa, _ = torch.frexp(quantize_groups(weights(16, 256), 64)[1])
    assert bool((mantissa * 2**11 == (mantissa * 2**11).round()).all())


def test_other_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="group=48 must be one of 32, 64, 128"):
        quantize_groups(weights(2, 96), 48)
