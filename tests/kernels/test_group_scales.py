"""Codes whose groups have scales and minima of their own: what they stand for, by torch and by the native library alike."""

from __future__ import annotations

import pytest
import torch

from twostroke.core.errors import ConfigError
from twostroke.core.schemes import SCHEMES
from twostroke.engine.lowering import packed_matrix
from twostroke.kernels.codes import Codes, quantize
from twostroke.kernels.matrix import quantize_rows
from twostroke.kernels.native_library import library

GENERATOR = torch.Generator().manual_seed(0)


def in_blocks(n: int, k: int) -> Codes:
    def random(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=GENERATOR, dtype=torch.uint8)

    units = torch.randn(n, -(-k // 256), 2, generator=GENERATOR).half().float()
    return Codes(random(16, n, k), units, random(64, n, -(-k // 32), 2))


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("k", [1, 31, 64, 200])
def test_eight_bit_groups_are_within_half_a_step(group: int, k: int) -> None:
    weight = torch.randn(7, k, generator=GENERATOR)
    codes = quantize(weight, SCHEMES[f"int8-g{group}"])
    assert codes.codes.dtype is torch.int8
    assert codes.scale.shape == (7, -(-k // group))
    assert torch.equal(codes.scale.half().float(), codes.scale)  # the packed form holds no more
    step = codes.scale.repeat_interleave(group, dim=1)[:, :k]
    assert bool(((codes.values() - weight).abs() <= 0.5001 * step).all())
    assert float(codes.values().abs().max()) > 0.98 * float(weight.abs().max())
    assert not bool(quantize(torch.zeros(3, 40), SCHEMES[f"int8-g{group}"]).values().any())


def test_a_block_gives_each_of_its_groups_a_scale_and_a_minimum() -> None:
    codes = in_blocks(3, 320)  # a whole block and one of two groups
    values = codes.values()
    for i in (0, 31, 32, 255, 256, 319):
        units, counts = codes.scale[:, i // 256].double(), codes.zero[:, i // 32].double()  # type: ignore[index]
        wanted = codes.codes[:, i] * units[:, 0] * counts[:, 0] - units[:, 1] * counts[:, 1]
        torch.testing.assert_close(values[:, i].double(), wanted, rtol=1e-6, atol=1e-5)


def test_nothing_is_rounded_to_blocks() -> None:
    with pytest.raises(ConfigError, match="nothing is rounded to it"):
        quantize(torch.ones(16, 256), SCHEMES["int4-k"])


@pytest.mark.skipif(library() is None, reason="the native library was not built")
@pytest.mark.parametrize("name", ["int8-g16", "int8-g32", "int4-k"])
def test_the_native_library_multiplies_what_the_codes_stand_for(name: str) -> None:
    scheme, (n, k) = SCHEMES[name], (40, 512)
    codes = in_blocks(n, k) if name == "int4-k" else quantize(torch.randn(n, k, generator=GENERATOR), scheme)
    x = torch.randn(9, k, generator=GENERATOR)
    rounded, scale = quantize_rows(x)
    exact = ((rounded.double() - 128) * scale) @ codes.values().double().t()
    found = packed_matrix(codes, scheme, None)(x).double()
    # Rows are rounded alike but for ties, and sums of 512 products in fp32.
    assert float((found - exact).abs().max() / exact.abs().max()) < 2e-3
