"""The library's int8 of a weight matrix, held against ``quantize_columns``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.kernels.matrix import quantize_columns
from twostroke.kernels.native_library import library, why_absent
from twostroke.kernels.native_matrix import native_columns

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 130),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    exponent=st.integers(-45, 30),
    seed=st.integers(0, 99),
)
def test_codes_and_scales_are_the_reference_to_the_bit(n: int, k: int, dtype: torch.dtype, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(n, k, generator=generator) * 10.0**exponent).to(dtype)
    weight[seed % n] = 0
    if not bool(torch.isfinite(weight).all()):
        weight = weight.nan_to_num(0.0, 1.0, -1.0)
    codes, scale = native_columns(weight)
    expected_codes, expected_scale = quantize_columns(weight)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected_codes)


def test_halves_are_rounded_to_even() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert native_columns(weight)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_the_scale(bad: float) -> None:
    weight = torch.ones(3, 40)
    weight[1, 7] = bad
    assert torch.isfinite(native_columns(weight)[1]).tolist() == [True, False, True]


def test_rows_that_do_not_lie_together_are_read_as_they_are() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))[::2, ::2]
    for found, expected in zip(native_columns(weight), quantize_columns(weight), strict=True):
        assert torch.equal(found, expected)
