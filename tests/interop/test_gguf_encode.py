"""Numbers that become GGUF's types: bytes against llama.cpp's own package, errors against plain rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from twostroke.core.errors import ConfigError, InputError
from twostroke.interop.gguf_encode import ENCODERS, encode, written_types
from twostroke.model.published.gguf_types import TYPES, dequantise

PLAIN = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_TYPES = {"Q4_K": 0.0725, "Q5_K": 0.0362, "Q6_K": 0.0181}
"""The relative error on normal numbers of llama.cpp's reference without a text (0.0719, 0.0360, 0.0178, measured), and 1%."""


def numbers(rows: int = 64, columns: int = 512, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, 1, generator=generator).mul(0.5).exp()
    return 0.02 * spread * torch.randn(rows, columns, generator=generator)


def back(name: str, raw: np.ndarray, shape: torch.Size) -> torch.Tensor:
    return dequantise(TYPES[name], raw).view(shape)


@pytest.mark.parametrize("name", PLAIN)
def test_bytes_are_those_of_llama_cpps_package(name: str) -> None:
    x = torch.cat((numbers(), torch.zeros(1, 512), torch.full((1, 512), -3.0), numbers(2) * 1e-6))
    theirs = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(encode(TYPES[name], x), theirs.reshape(-1))


@pytest.mark.parametrize("name", K_TYPES)
def test_k_types_are_read_by_llama_cpps_package_and_as_near_as_its_reference(name: str) -> None:
    x = numbers()
    raw = encode(TYPES[name], x)
    values = back(name, raw, x.shape)
    theirs = gguf.quants.dequantize(raw.reshape(len(x), -1), gguf.GGMLQuantizationType[name])
    assert np.array_equal(values.numpy(), theirs)
    assert float((values - x).norm() / x.norm()) < K_TYPES[name]


@pytest.mark.parametrize("name", [*K_TYPES, "Q4_0", "Q5_0"])
def test_errors_move_to_columns_that_matter_less(name: str) -> None:
    x = numbers(seed=1)
    importance = torch.randn(512, generator=torch.Generator().manual_seed(2)).mul(1.5).exp()
    plain, guided = (back(name, encode(TYPES[name], x, given), x.shape) for given in (None, importance))
    errors = [float(((values - x).square() * importance).sum()) for values in (plain, guided)]
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize("name", ENCODERS)
def test_zeros_equal_numbers_and_the_smallest_ones_come_back(name: str) -> None:
    x = torch.cat((torch.zeros(1, 256), torch.full((1, 256), 0.25), torch.full((1, 256), -2.0), torch.full((1, 256), 1e-42)))
    for importance in (None, torch.zeros(256), torch.ones(256)):
        values = back(name, encode(TYPES[name], x, importance), x.shape)
        assert (values - x).abs().max() <= 0.01
        assert (values[0] == 0).all()


def test_threads_do_not_change_a_byte() -> None:
    x, importance = numbers(600, 512), torch.rand(512)
    alone = encode(TYPES["Q4_K"], x, importance)
    torch.set_num_threads(2)
    assert np.array_equal(encode(TYPES["Q4_K"], x, importance), alone)
    torch.set_num_threads(1)


def test_what_a_type_does_not_hold_is_told() -> None:
    with pytest.raises(InputError, match="7e\\+04 is beyond the largest number that F16 holds"):
        encode(TYPES["F16"], torch.full((1, 32), 7e4))
    with pytest.raises(InputError, match="beyond the largest that fp16 holds"):
        encode(TYPES["Q8_0"], torch.full((1, 32), 1e8))
    with pytest.raises(ConfigError, match="Q2_K is read and not written"):
        encode(TYPES["Q2_K"], torch.zeros(1, 256))
    assert set(written_types()) == {"F32", "F16", "BF16", *ENCODERS}
