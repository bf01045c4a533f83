"""Native attention of training against plain attention in fp32, value and gradient, on every layout it reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twostroke.kernels import training_attention
from twostroke.kernels.training_attention import packed_attention
from twostroke.model.attention import attention_mask, explicit_attention, first_visible

pytestmark = pytest.mark.skipif(not training_attention.is_available(), reason="no native library, or no AVX-512-BF16")

ROUNDED = 6e-3
"""Relative error of a sum of values that were rounded to bf16 (2⁻⁹ each): measured 2.5·10⁻³ to 3.7·10⁻³."""

SUMMED = 1.5e-2
"""The same of a sink's gradient, a sum over all tokens of terms of both signs that mostly cancel."""


def plain_attention(
    qkv: Tensor,
    first: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    n_heads: int,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Every key's score at once, without blocks; a sink's share of the softmax is dropped."""
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
    scores = q @ k.transpose(-1, -2) / qkv.shape[3] ** 0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    return (scores.softmax(dim=-1)[..., : len(index)] @ v).transpose(1, 2)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp_min(1e-20))


def packed(n_rows: int, n_tokens: int, window: int | None, generator: torch.Generator) -> Tensor:
    begins = torch.rand(n_rows, n_tokens, generator=generator) < 0.02
    index = torch.arange(n_tokens)
    first = torch.where(begins, index, 0).cummax(dim=1).values
    return (first if window is None else torch.maximum(first, index - window + 1)).int()


@pytest.mark.parametrize(("cap", "has_sinks"), [(None, False), (1.5, False), (None, True), (0.7, True)])
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
    n_rows: int,
    n_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    width: int,
    rope_rows: int,
    window: int | None,
    cap: float | None,
    has_sinks: bool,
) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    qkv = torch.randn(n_rows, n_tokens, n_heads + 2 * n_kv_heads, width, generator=generator).bfloat16()
    upstream = torch.randn(n_rows, n_tokens, n_heads, width, generator=generator).bfloat16()
    first = packed(n_rows, n_tokens, window, generator)
    angles = torch.rand(max(1, rope_rows), n_tokens, width // 2, generator=generator) * 6
    rope = (angles.cos(), angles.sin()) if rope_rows else None
    # Sinks below most scores up to far above all of them.
    sinks = torch.linspace(-2, 6, n_heads).bfloat16().requires_grad_() if has_sinks else None
    exact_sinks = None if sinks is None else sinks.detach().float().requires_grad_()

    exact = qkv.float().requires_grad_()
    expected = plain_attention(exact, first, rope, n_heads, cap, exact_sinks)
    expected_gradient, *of_sinks = torch.autograd.grad(
        expected, [exact] if exact_sinks is None else [exact, exact_sinks], upstream.float()
    )
    ours = qkv.clone().requires_grad_()
    found = packed_attention(ours, first, rope, n_heads, ours.shape[-1] ** -0.5, cap, sinks)
    gradient, *sinks_gradient = torch.autograd.grad(found, [ours] if sinks is None else [ours, sinks], upstream)

    for theirs, got in zip(of_sinks, sinks_gradient, strict=True):
        assert got.dtype == torch.bfloat16
        assert relative_error(got, theirs) < SUMMED
    assert relative_error(found.detach(), expected.detach()) < ROUNDED
    for part in ("q", "k", "v"):
        heads = {"q": slice(0, n_heads), "k": slice(n_heads, -n_kv_heads), "v": slice(-n_kv_heads, None)}[part]
        theirs = expected_gradient[:, :, heads]
        # A query that sees one key has no gradient, and beside a sink the difference of ∂P and its sum with the rounded output.
        if theirs.norm() > 1e-5:
            one_key = has_sinks and 1 in (n_tokens, window)
            assert relative_error(gradient[:, :, heads], theirs) < (2 if one_key else 1) * ROUNDED, part


def test_what_is_outside_the_document_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, 200, 6, 64, generator=generator).bfloat16()
    first = torch.where(torch.arange(200) >= 90, 90, 0).int()[None]
    changed = qkv.clone()
    changed[:, :90] = 1e4
    assert torch.equal(
        packed_attention(qkv, first, None, 2, 0.125)[:, 90:], packed_attention(changed, first, None, 2, 0.125)[:, 90:]
    )


def test_a_bound_is_exact_from_the_smallest_scores_to_saturated_ones() -> None:
    """A query that sees one key has the bounded score as the logarithm of its sum, in fp32."""
    cap = 50.0
    magnitudes = torch.logspace(-6, 4, 4000, base=10.0).bfloat16()
    values = torch.cat((magnitudes, -magnitudes, torch.zeros(1, dtype=torch.bfloat16)))
    qkv = torch.zeros(1, len(values), 3, 32, dtype=torch.bfloat16)
    qkv[0, :, 0, 0], qkv[0, :, 1, 0] = values, 1.0
    alone = torch.arange(len(values), dtype=torch.int32)[None]
    _, log_sums = torch.ops.twostroke.packed_attention(qkv, alone, None, None, None, 1, 1.0, cap)
    found = log_sums[0, 0].double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
    expected = cap * torch.tanh(values.double() / cap)
    assert torch.allclose(found, expected, rtol=2e-6, atol=0)
    assert found.abs().max() <= cap * (1 + 2e-6)


def test_a_sink_beyond_all_scores_leaves_nothing_and_one_below_all_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, 100, 6, 64, generator=generator).bfloat16()
    first = torch.zeros(1, 100, dtype=torch.int32)
    plain = packed_attention(qkv, first, None, 2, 0.125)
    sinks = torch.tensor([-1e4, 1e4], requires_grad=True)
    read = qkv.clone().requires_grad_()
    out = packed_attention(read, first, None, 2, 0.125, sinks=sinks)
    assert torch.equal(out[:, :, 0], plain[:, :, 0])
    assert not out[:, :, 1].any()
    of_qkv, of_sinks = torch.autograd.grad(out.float().sum(), (read, sinks))
    assert of_qkv.isfinite().all()
    assert torch.equal(of_sinks, torch.zeros(2))


@pytest.mark.parametrize(("cap", "has_sinks"), [(3.0, False), (None, True)])
def test_the_native_operator_and_explicit_attention_compute_one_thing(cap: float | None, has_sinks: bool) -> None:
    """What the decoder takes where the native operator is not there, on documents under a window, with grouped heads."""
    generator = torch.Generator().manual_seed(1)
    n_heads, n_kv_heads, window = 4, 2, 50
    qkv = torch.randn(2, 200, n_heads + 2 * n_kv_heads, 32, generator=generator).bfloat16()
    documents = (torch.arange(200) >= torch.tensor([[70], [130]])).int()
    sinks = torch.linspace(-1, 3, n_heads).bfloat16() if has_sinks else None
    first = first_visible(200, window, documents, 2, qkv.device)
    mask = attention_mask(200, window, documents, qkv.device, torch.float32, True)
    assert mask is not None
    q, k, v = (x.transpose(1, 2).float() for x in qkv.split((n_heads, n_kv_heads, n_kv_heads), dim=2))
    explicit = explicit_attention(q, k, v, mask, 0.0, 32**-0.5, cap, sinks).transpose(1, 2)
    native = packed_attention(qkv, first, None, n_heads, 32**-0.5, cap, sinks)
    assert relative_error(native, explicit) < ROUNDED


def test_results_do_not_depend_on_threads_nor_on_the_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(4, 150, 6, 64, generator=generator).bfloat16().requires_grad_()
    first = torch.zeros(4, 150, dtype=torch.int32)
    threads = torch.get_num_threads()
    sinks = torch.tensor([0.5, 1.5], requires_grad=True)
    results = []
    try:
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            out = packed_attention(qkv, first, None, 2, 0.125, 2.0, sinks)
            results.append((out, *torch.autograd.grad(out, (qkv, sinks), torch.ones_like(out))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(packed_attention(qkv[2:3], first[:1], None, 2, 0.125, 2.0, sinks)[0], results[0][0][2])


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_operator_keeps_torchs_rules(has_sinks: bool) -> None:
    qkv = torch.randn(1, 40, 6, 32).bfloat16().requires_grad_()
    first = torch.zeros(1, 40, dtype=torch.int32)
    angles = torch.rand(1, 40, 16)
    sinks = torch.zeros(2, requires_grad=True) if has_sinks else None
    torch.library.opcheck(
        torch.ops.twostroke.packed_attention.default,
        (qkv, first, angles.cos(), angles.sin(), sinks, 2, 32**-0.5, 4.0),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_other_layouts_are_refused() -> None:
    first = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match="float32"):
        packed_attention(torch.randn(1, 8, 6, 64), first, None, 2, 0.125)
    with pytest.raises(ValueError, match="multiple of 32"):
        packed_attention(torch.randn(1, 8, 6, 48).bfloat16(), first, None, 2, 0.125)
    with pytest.raises(ValueError, match="one for each of 2 heads"):
        packed_attention(torch.randn(1, 8, 6, 64).bfloat16(), first, None, 2, 0.125, sinks=torch.zeros(3))
