from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.crossovers import Crossovers
from twostroke.core.errors import ConfigError
from twostroke.kernels.features import has_packed_linear, has_w8a8_linear
from twostroke.kernels.matrix import FloatMatrix, Int8Matrix, quantize_columns, quantize_rows

ODD = st.integers(1, 70)
SHAPES = {"m": st.integers(1, 40), "n": ODD, "k": ODD, "seed": st.integers(0, 99)}
FEW = settings(max_examples=40, deadline=None, derandomize=True)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference as a share of the reference's largest value."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-9))


@FEW
@given(**SHAPES, bias=st.booleans(), residual=st.booleans(), packed=st.booleans(), bf16=st.booleans())
def test_float_matrix_is_the_plain_product(
    m: int, n: int, k: int, seed: int, bias: bool, residual: bool, packed: bool, bf16: bool
) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    if packed and not has_packed_linear(dtype):
        return
    x, w = random(seed, m, k).to(dtype), random(seed + 1, n, k).to(dtype)
    b = random(seed + 2, n).to(dtype) if bias else None
    r = random(seed + 3, m, n).to(dtype) if residual else None
    expected = F.linear(x.float(), w.float(), None if b is None else b.float()) + (0 if r is None else r.float())
    before = None if r is None else r.clone()
    found = FloatMatrix(w, b, packed=packed)(x, r)
    assert found.dtype == dtype
    # bf16 rounds the sum once or twice, 2⁻⁸ each; fp32 sums of 70 terms differ in their order
    assert relative(found, expected) <= (2**-6 if bf16 else 1e-5)
    if r is not None and before is not None:
        assert torch.equal(r, before)


def test_packing_accepts_rows_of_a_larger_buffer() -> None:
    w = random(0, 24, 16)
    x = random(1, 5, 40)[:, 8:24]
    assert relative(FloatMatrix(w)(x), x @ w.T) <= 1e-5


def reference_weight_only(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.float() @ (codes.float() * scale[:, None]).T


def reference_w8a8(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Integers by integers in int64, so that nothing is rounded before the scales."""
    row, row_scale = quantize_rows(x)
    sums = (row.long() - 128) @ codes.long().T
    return sums.double().mul(row_scale).mul(scale).float()


@FEW
@given(**SHAPES)
def test_each_int8_kernel_is_its_reference(m: int, n: int, k: int, seed: int) -> None:
    x = random(seed, m, k).bfloat16()
    codes, scale = quantize_columns(random(seed + 1, n, k))
    matrix = Int8Matrix(codes, scale, crossovers=Crossovers(int8_weight_only_max_macs=1e12))
    tolerance = 2**-7  # one rounding of the result to bf16, and of the scales to bf16 in the weight-only kernel
    if matrix.largest_weight_only:
        assert relative(matrix.weight_only(x), reference_weight_only(x, codes, scale)) <= tolerance
    if has_w8a8_linear():
        assert relative(matrix.w8a8(x), reference_w8a8(x, codes, scale)) <= 2**-8
        assert relative(matrix.w8a8(x.float()), reference_w8a8(x, codes, scale)) <= 1e-6  # exact integers, fp32 scales
    expanded = Int8Matrix(codes, scale, crossovers=Crossovers(int8_weight_only_max_macs=0), integers=False)
    assert relative(expanded(x), reference_weight_only(x, codes, scale)) <= tolerance


@pytest.mark.parametrize("limit", [0.0, 1e12])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_int8_matrix_adds_bias_and_residual_whichever_kernel_runs(limit: float, rows: int) -> None:
    x, w, b, r = random(0, rows, 48).bfloat16(), random(1, 32, 48), random(2, 32).bfloat16(), random(3, rows, 32).bfloat16()
    before = r.clone()
    matrix = Int8Matrix(*quantize_columns(w), b, Crossovers(int8_weight_only_max_macs=limit))
    expected = x.float() @ w.T + b.float() + r.float()
    assert relative(matrix(x, r), expected) <= 0.03  # 8-bit weights, 8-bit activations
    assert torch.equal(r, before)


def test_columns_that_the_weight_only_kernel_misreads_never_reach_it() -> None:
    unlimited = Crossovers(int8_weight_only_max_macs=1e12)
    for k in range(1, 70):
        matrix = Int8Matrix(*quantize_columns(random(0, 4, k)), crossovers=unlimited)
        assert matrix.largest_weight_only == 0 or k % 32 == 0


def test_a_large_matrix_keeps_one_copy_of_its_weights() -> None:
    if not has_w8a8_linear():
        pytest.skip("this CPU has no exact 8-bit products")
    codes, scale = quantize_columns(random(0, 64, 64))
    assert Int8Matrix(codes, scale, crossovers=Crossovers(int8_weight_only_max_macs=100)).weight is None


@pytest.mark.skipif(not has_w8a8_linear(), reason="this CPU has no exact 8-bit products")
def test_w8a8_does_not_depend_on_the_batch() -> None:
    codes, scale = quantize_columns(random(1, 40, 56))
    matrix = Int8Matrix(codes, scale)
    x = random(2, 33, 56).bfloat16()
    whole = matrix.w8a8(x)
    for i in (0, 7, 32):
        assert torch.equal(matrix.w8a8(x[i : i + 1]), whole[i : i + 1])


@FEW
@given(n=ODD, k=ODD, seed=st.integers(0, 99))
def test_quantised_weights_are_within_half_a_step(n: int, k: int, seed: int) -> None:
    w = random(seed, n, k)
    codes, scale = quantize_columns(w)
    assert float(((codes.float() * scale[:, None] - w).abs() / scale[:, None]).max()) <= 0.5 + 1e-4  # fp32 division
    rows, row_scale = quantize_rows(w)
    assert float((((rows.float() - 128) * row_scale - w).abs() / row_scale).max()) <= 0.5 + 1e-4


def test_zero_rows_and_channels_stay_zero() -> None:
    codes, scale = quantize_columns(torch.zeros(3, 4))
    assert codes.abs().max() == 0
    assert torch.isfinite(scale).all()
    rows, row_scale = quantize_rows(torch.zeros(2, 4))
    assert torch.equal(rows, torch.full((2, 4), 128, dtype=torch.uint8))
    assert torch.isfinite(row_scale).all()


def test_a_profile_overrides_a_crossover() -> None:
    with pytest.raises(ConfigError, match="flash_max_scores=-1"):
        Crossovers(flash_max_scores=-1)
