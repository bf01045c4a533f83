"""Native attention of training against plain attention in fp32, value and gradient, on every layout it reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twostroke.kernels import training_attention
from twostroke.kernels.training_attention import packed_attention

pytestmark = pytest.mark.skipif(not training_attention.is_available(), reason="no native library, or no AVX-512-BF16")

ROUNDED = 6e-3
"""Relative error of a sum of values that were rounded to bf16 (2⁻⁹ each): measured 2.5·10⁻³ to 3.7·10⁻³."""


def plain_attention(qkv: Tensor, first: Tensor, rope: tuple[Tensor, Tensor] | None, n_heads: int) -> Tensor:
    n_kv_heads = (qkv.shape[2] - n_heads) // 2
    q, k, v = qkv.split((n_heads, n_kv_heads, n_kv_heads), dim=2)

    def turned(x: Tensor) -> Tensor:
        if rope is None:
            return x
        (a, b), cos, sin = x.chunk(2, dim=-1), rope[0][:, :, None], rope[1][:, :, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    q, k, v = turned(q).transpose(1, 2), turned(k).transpose(1, 2), v.transpose(1, 2)
    k, v = (x.repeat_interleave(n_heads // n_kv_heads, dim=1) for x in (k, v))
    index = torch.arange(qkv.shape[1])
    seen = (index <= index[:, None]) & (index >= first[:, :, None])
    scores = (q @ k.transpose(-1, -2) / qkv.shape[3] ** 0.5).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp_min(1e-20))


def packed(n_rows: int, n_tokens: int, window: int | None, generator: torch.Generator) -> Tensor:
    begins = torch.rand(n_rows, n_tokens, generator=generator) < 0.02
    index = torch.arange(n_tokens)
    first = torch.where(begins, index, 0).cummax(dim=1).values
    return (first if window is None else torch.maximum(first, index - window + 1)).int()


@pytest.mark.parametrize(
    ("n_rows", "n_tokens", "n_heads", "n_kv_heads", "width", "rope_rows", "window"),
    [
        (2, 512, 6, 6, 64, 2, None),
        (1, 130, 4, 2, 32, 1, None),
        (2, 64, 2, 1, 128, 0, None),
        (2, 300, 3, 3, 96, 2, 77),
        (3, 1, 2, 2, 64, 1, None),
        (1, 65, 8, 1, 64, 1, 1),
    ],
)
def test_value_and_gradient_are_those_of_plain_attention(
    n_rows: int, n_tokens: int, n_heads: int, n_kv_heads: int, width: int, rope_rows: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    qkv = torch.randn(n_rows, n_tokens, n_heads + 2 * n_kv_heads, width, generator=generator).bfloat16()
    upstream = torch.randn(n_rows, n_tokens, n_heads, width, generator=generator).bfloat16()
    first = packed(n_rows, n_tokens, window, generator)
    angles = torch.rand(max(1, rope_rows), n_tokens, width // 2, generator=generator) * 6
    rope = (angles.cos(), angles.sin()) if rope_rows else None

    exact = qkv.float().requires_grad_()
    expected = plain_attention(exact, first, rope, n_heads)
    (expected_gradient,) = torch.autograd.grad(expected, exact, upstream.float())
    ours = qkv.clone().requires_grad_()
    found = packed_attention(ours, first, rope, n_heads, ours.shape[-1] ** -0.5)
    (gradient,) = torch.autograd.grad(found, ours, upstream)

    assert relative_error(found.detach(), expected.detach()) < ROUNDED
    for part in ("q", "k", "v"):
        heads = {"q": slice(0, n_heads), "k": slice(n_heads, -n_kv_heads), "v": slice(-n_kv_heads, None)}[part]
        theirs = expected_gradient[:, :, heads]
        if theirs.norm() > 1e-5:  # a query that sees one key has no gradient
            assert relative_error(gradient[:, :, heads], theirs) < ROUNDED, part


def test_what_is_outside_the_document_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, 200, 6, 64, generator=generator).bfloat16()
    first = torch.where(torch.arange(200) >= 90, 90, 0).int()[None]
    changed = qkv.clone()
    changed[:, :90] = 1e4
    assert torch.equal(
        packed_attention(qkv, first, None, 2, 0.125)[:, 90:], packed_attention(changed, first, None, 2, 0.125)[:, 90:]
    )


def test_results_do_not_depend_on_threads_nor_on_the_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(4, 150, 6, 64, generator=generator).bfloat16().requires_grad_()
    first = torch.zeros(4, 150, dtype=torch.int32)
    threads = torch.get_num_threads()
    results = []
    try:
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            out = packed_attention(qkv, first, None, 2, 0.125)
            results.append((out, torch.autograd.grad(out, qkv, torch.ones_like(out))[0]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(packed_attention(qkv[2:3], first[:1], None, 2, 0.125)[0], results[0][0][2])


def test_the_operator_keeps_torchs_rules() -> None:
    qkv = torch.randn(1, 40, 6, 32).bfloat16().requires_grad_()
    first = torch.zeros(1, 40, dtype=torch.int32)
    angles = torch.rand(1, 40, 16)
    torch.library.opcheck(
        torch.ops.twostroke.packed_attention.default,
        (qkv, first, angles.cos(), angles.sin(), 2, 32**-0.5),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_other_layouts_are_refused() -> None:
    first = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match="float32"):
        packed_attention(torch.randn(1, 8, 6, 64), first, None, 2, 0.125)
    with pytest.raises(ValueError, match="multiple of 32"):
        packed_attention(torch.randn(1, 8, 6, 48).bfloat16(), first, None, 2, 0.125)
