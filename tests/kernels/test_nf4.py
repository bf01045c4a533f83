from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F

from twostroke.core.policy import NF4_SCALE_BLOCK
from twostroke.kernels.nf4 import NF4_VALUES, Nf4Matrix, dequantize_nf4, nf4_linear, quantize_nf4


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_values_are_quantiles_of_the_normal_distribution() -> None:
    """bitsandbytes' construction: 8 equal steps of probability from 0.9677083 to ½ on the positive side, 7 on the negative."""
    offset, normal = 0.9677083, NormalDist()
    positive = [normal.inv_cdf(offset + (0.5 - offset) * i / 8) for i in range(8)]
    negative = [-normal.inv_cdf(offset + (0.5 - offset) * i / 7) for i in range(7)]
    values = sorted([*positive, 0.0, *negative])
    derived = [value / max(values) for value in values]
    # The published values are these in fp32, from another implementation of the inverse error function.
    assert pytest.approx(derived, abs=1e-6) == NF4_VALUES


def slow(weight: torch.Tensor, block: int) -> torch.Tensor:
    """NF4 without double quantisation, a value at a time."""
    flat, result = weight.flatten().tolist(), []
    for start in range(0, len(flat), block):
        values = flat[start : start + block]
        scale = max(map(abs, values))
        result += [min(NF4_VALUES, key=lambda v, x=x: abs(v * scale - x)) * scale for x in values]
    return torch.tensor(result).view(weight.shape)


@pytest.mark.parametrize(("shape", "block"), [((6, 64), 64), ((5, 7), 4), ((3, 50), 64), ((1, 1), 2)])
def test_each_value_becomes_the_nearest_of_its_block(shape: tuple[int, int], block: int) -> None:
    weight = random(0, *shape)
    torch.testing.assert_close(dequantize_nf4(quantize_nf4(weight, block, double=False)), slow(weight, block))


def test_codes_are_packed_as_bitsandbytes_packs_them() -> None:
    """First value in the high half of the byte; −1 is code 0, 0 is 7, 1 is 15."""
    matrix = quantize_nf4(torch.tensor([[1.0, -1.0, 0.0, 0.43]]), block=4, double=False)
    assert matrix.codes.tolist() == [0xF0, 0x7C]
    assert matrix.scales.tolist() == [1.0]


def test_what_nf4_can_hold_comes_back_exactly() -> None:
    scales = torch.tensor([0.5, 2.0, 3.0])
    weight = torch.tensor(NF4_VALUES)[None] * scales[:, None]
    assert torch.equal(dequantize_nf4(quantize_nf4(weight, block=16, double=False)), weight)


def test_zero_and_constant_blocks() -> None:
    weight = torch.cat([torch.zeros(64), torch.full((64,), -0.3)])[None]
    for double in (False, True):
        # 0.3 / 254: half a step of the second quantisation, of scales that lie 0.15 around their mean.
        torch.testing.assert_close(dequantize_nf4(quantize_nf4(weight, 64, double)), weight, atol=0.3 / 254, rtol=0)


def test_normal_weights_lose_less_than_in_int4_and_double_quantisation_adds_little() -> None:
    weight = random(1, 256, 1024)
    errors = {d: float((dequantize_nf4(quantize_nf4(weight, 64, d)) - weight).square().mean()) for d in (False, True)}
    blocks = weight.view(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 7
    int4 = float(((blocks / scale).round() * scale - blocks).square().mean())
    assert errors[False] < 0.85 * int4  # the paper's point; evenly spaced codes are wasted on the tails
    assert errors[True] < 1.02 * errors[False]


def test_double_quantisation_needs_4127_thousandths_of_a_bit_a_weight() -> None:
    matrix = quantize_nf4(random(2, 256, 1024), 64, double=True)
    bits = 8 * sum(t.numel() * t.element_size() for t in matrix.tensors.values()) / (256 * 1024)
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * NF4_SCALE_BLOCK), abs=2e-4)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_decoded_matrix(double: bool, dtype: torch.dtype) -> None:
    matrix: Nf4Matrix = quantize_nf4(random(3, 24, 40), 64, double)
    x = random(4, 5, 40).to(dtype).requires_grad_()
    y = nf4_linear(x, matrix)
    (ours,) = torch.autograd.grad(y.square().sum(), x)
    reference = F.linear(x, dequantize_nf4(matrix, dtype))
    (theirs,) = torch.autograd.grad(reference.square().sum(), x)
    assert torch.equal(y, reference)
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch: deprecations
def test_a_compiled_product_decodes_its_matrix_again_in_backward_and_keeps_none() -> None:
    """A compiler that found the same operations in forward and backward kept the codes as int32 between them."""
    up, down = quantize_nf4(random(0, 256, 192)), quantize_nf4(random(2, 192, 256))

    def two_products(x: torch.Tensor) -> torch.Tensor:
        return nf4_linear(torch.tanh(nf4_linear(x, up)), down).square()

    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    x = random(1, 8, 192).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = torch.compile(two_products, dynamic=False)(x)
    assert max(kept) < 256 * 192  # codes take half a byte a weight, as int32 two
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(two_products(x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)  # sums of 256 fp32 products in another order
