"""The Hadamard transform and the codes of an int4 cache."""

from __future__ import annotations

import pytest
import torch

from twostroke.kernels import four_bit_cache as cache

SIZES = (1, 2, 7, 8, 12, 64, 96, 128, 576)


def heads_of(size: int, n: int = 50) -> torch.Tensor:
    return torch.randn((3, n, size), generator=torch.Generator().manual_seed(size))


def sylvester(size: int) -> torch.Tensor:
    """By its definition: H of 2n is (H, H; H, −H) of n, over blocks."""
    block, h = size & -size, torch.ones((1, 1))
    while len(h) < block:
        h = torch.cat((torch.cat((h, h), dim=1), torch.cat((h, -h), dim=1)))
    return torch.block_diag(*[h / block**0.5] * (size // block))


@pytest.mark.parametrize("size", SIZES)
def test_the_transform_is_orthonormal_and_its_own_inverse(size: int) -> None:
    heads = heads_of(size)
    found = cache.hadamard(heads)
    torch.testing.assert_close(found, heads @ sylvester(size), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.hadamard(found), heads, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found @ found.transpose(1, 2), heads @ heads.transpose(1, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_codes_are_packed_two_a_byte_and_come_back(size: int) -> None:
    codes = torch.randint(0, 16, (3, 4, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    neighbours, halves = cache.pack_neighbours(codes), cache.pack_halves(codes)
    assert neighbours.shape == halves.shape == (3, 4, -(-size // 2))
    assert torch.equal(cache.unpack_neighbours(neighbours, size), codes)
    assert torch.equal(cache.unpack_halves(halves, size), codes)
    if size > 2:
        assert torch.equal(neighbours[..., 0], codes[..., 0] | codes[..., 1] << 4)
        assert torch.equal(halves[..., 0], codes[..., 0] | codes[..., -(-size // 2)] << 4)


@pytest.mark.parametrize("size", SIZES[1:])
def test_no_number_is_off_by_more_than_half_a_step(size: int) -> None:
    heads = heads_of(size) + 3.0  # keys on one side of zero
    codes, ranges = cache.key_codes(heads)
    width = heads.amax(dim=-1) - heads.amin(dim=-1)
    error = (cache.keys_of(codes, ranges) - heads).abs().amax(dim=-1)
    # Half of a fifteenth, and what rounding scale and middle to bf16 takes off the ends.
    assert bool((error <= width / 30 + 2**-8 * heads.abs().amax(dim=-1) + 1e-6).all())
    codes, scales = cache.value_codes(heads)
    assert bool(((cache.values_of(codes, scales) - heads).abs() <= 0.5001 * scales[..., None]).all())
    assert int(codes.max()) == 15


def test_heads_of_zeros_and_of_one_number_come_back() -> None:
    for heads in (torch.zeros((2, 3, 8)), torch.full((2, 3, 8), 5.0)):
        torch.testing.assert_close(cache.keys_of(*cache.key_codes(heads)), heads, rtol=0, atol=1e-6)
    assert float(cache.values_of(*cache.value_codes(torch.zeros((2, 3, 8)))).abs().max()) < 1e-29


def test_the_transform_saves_what_a_large_dimension_costs_the_others() -> None:
    """Errors in the scores of queries that do not look at the large dimension."""
    keys, queries = heads_of(64, 200), heads_of(64, 201)[:, :200]
    plain = keys.clone()
    keys[..., 5] *= 30.0
    queries[..., 5] = 0.0

    def error(heads: torch.Tensor, transformed: bool) -> float:
        turn = cache.hadamard if transformed else (lambda x: x)
        held = cache.keys_of(*cache.key_codes(turn(heads)))
        return float(((turn(queries) * held).sum(-1) - (queries * heads).sum(-1)).square().mean().sqrt())

    print(f"plain {error(keys, False):.3f}, transformed {error(keys, True):.3f}, no such dimension {error(plain, True):.3f}")
    assert error(keys, True) < 0.6 * error(keys, False)
    assert error(plain, True) < error(keys, True)
