"""Attention over packed documents by a GPU's flash kernel: where documents begin, and the same values and gradients as under a
mask. Without a GPU the kernel is stood in for, so that everything around it runs here too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from small_models import SPECS
from twostroke.kernels import flash_attention
from twostroke.kernels.flash_attention import document_starts
from twostroke.model import attention
from twostroke.model.attention import attention_mask, explicit_attention
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise

GPU = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
HAS_KERNEL = flash_attention.is_available(GPU)

ROUNDED = 1e-2
"""Relative error of a sum of values that were rounded to bf16, 2⁻⁹ each, in a product and in probabilities."""


def documents_of(n_rows: int, n_tokens: int, seed: int, often: float = 0.05) -> Tensor:
    begins = torch.rand(n_rows, n_tokens, generator=torch.Generator().manual_seed(seed)) < often
    return begins.cumsum(dim=1).to(torch.int32)


def under_mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float, window: int | None) -> Tensor:
    """(B, T, H, D) by explicit attention in the type of ``q``."""
    mask = attention_mask(q.shape[1], window, documents, q.device, q.dtype, explicit=True)
    assert mask is not None
    return explicit_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, 0.0, scale).transpose(1, 2)


def probabilities(q: Tensor, k: Tensor, starts: Tensor, scale: float, window: int | None) -> Tensor:
    """(H, n, n) of flattened rows, each query's over all keys."""
    index = torch.arange(len(q))
    number = torch.bucketize(index, starts[1:], right=True)
    seen = (number == number[:, None]) & (index <= index[:, None]) & (index[:, None] - index < (window or len(q)))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)


@flash_attention._attend.register_kernel("cpu")
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    assert int((starts[1:] - starts[:-1]).max()) <= longest
    weights = probabilities(q, k, starts, scale, window)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    return out, torch.zeros(q.shape[1], q.shape[0])


@flash_attention._attend_backward.register_kernel("cpu")
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor,
    starts: Tensor, longest: int, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    group, weights = q.shape[1] // k.shape[1], probabilities(q, k, starts, scale, window)
    of_weights = torch.einsum("qhd,khd->hqk", gradient, v.repeat_interleave(group, dim=1))
    of_scores = weights * (of_weights - (gradient * out).sum(-1).t()[..., None]) * scale
    dq = torch.einsum("hqk,khd->qhd", of_scores, k.repeat_interleave(group, dim=1))
    dk = torch.einsum("hqk,qhd->khd", of_scores, q)
    dv = torch.einsum("hqk,qhd->khd", weights, gradient)
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def test_starts_are_where_numbers_change_and_where_rows_begin() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [5, 6, 5, 5]])
    assert document_starts(documents).tolist() == [0, 2, 4, 8, 9, 10, 12]
    assert document_starts(documents).dtype == torch.int32


@pytest.mark.skipif(not HAS_KERNEL, reason="no NVIDIA GPU since Ampere")
@pytest.mark.parametrize("window", [None, 1, 37, 4096])
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(6, 6, 64), (8, 2, 128), (4, 1, 80), (2, 2, 256)])
def test_values_and_gradients_are_those_under_a_mask(n_heads: int, n_kv_heads: int, head_dim: int, window: int | None) -> None:
    n_rows, n_tokens, scale = 3, 200, 0.7 / head_dim**0.5
    generator = torch.Generator().manual_seed(head_dim)
    shapes = [(n_rows, n_tokens, heads, head_dim) for heads in (n_heads, n_kv_heads, n_kv_heads)]
    exact = [torch.randn(shape, generator=generator).to(GPU).bfloat16().double().requires_grad_() for shape in shapes]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    documents = documents_of(n_rows, n_tokens, 0).to(GPU)
    found = flash_attention.flash_attention(*rounded, document_starts(documents), scale, window)
    expected = under_mask(*exact, documents, scale, window)
    upstream = torch.randn(found.shape, generator=generator).to(GPU)
    found.backward(upstream.bfloat16())
    expected.backward(upstream.double())
    for name, one, other in zip(
        ("out", "q", "k", "v"), (found, *(x.grad for x in rounded)), (expected, *(x.grad for x in exact)), strict=True
    ):
        assert one is not None
        assert other is not None
        assert float((one.double() - other).norm() / other.norm()) < ROUNDED, name


def test_a_kernel_is_taken_after_its_proof_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the stand-in is proven; one that sees a key too many is not."""
    assert flash_attention._error(GPU) < flash_attention.PROVEN_WITHIN
    sound = flash_attention.flash_attention
    monkeypatch.setattr(flash_attention, "flash_attention", lambda *of: sound(*of[:-1], of[-1] + 1))
    assert flash_attention._error(GPU) > flash_attention.PROVEN_WITHIN


@pytest.fixture
def takes_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over documents is flash attention's in every type, wherever it computes."""
    monkeypatch.setattr(attention, "attends_natively", lambda *of: False)
    if not HAS_KERNEL:
        monkeypatch.setattr(attention, "attends_by_flash", lambda *of: True)


def loss_and_gradients(decoder: Decoder, tokens: Tensor, documents: Tensor) -> tuple[float, list[Tensor]]:
    decoder.zero_grad()
    hidden = decoder.hidden(tokens, None, documents).float()
    loss = (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden.device)).mean()
    loss.backward()
    return float(loss.detach()), [p.grad.float() for p in decoder.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2", "gpt2"])
def test_a_decoder_computes_what_it_does_under_masks(family: str, monkeypatch: pytest.MonkeyPatch, takes_flash: None) -> None:
    spec, dtype = SPECS[family], torch.bfloat16 if HAS_KERNEL else torch.float32
    decoder = Decoder(spec, device=str(GPU))
    initialise(decoder, 0)
    decoder.to(dtype).train()
    tokens = torch.randint(0, spec.vocab_size, (2, 60), device=GPU)
    documents = documents_of(2, 60, 1).to(GPU)
    loss, gradients = loss_and_gradients(decoder, tokens, documents)
    monkeypatch.setattr(attention, "attends_by_flash", lambda *of: False)
    expected, masked = loss_and_gradients(decoder, tokens, documents)
    within = 3e-2 if HAS_KERNEL else 1e-5
    assert loss == pytest.approx(expected, rel=within, abs=1e-6)
    for one, other in zip(gradients, masked, strict=True):
        assert float((one - other).norm() / other.norm().clamp_min(1e-20)) < within


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_block_is_one_graph_for_any_number_of_documents(takes_flash: None) -> None:
    counted = CompileCounter()
    spec = SPECS["llama"]
    decoder = Decoder(spec, torch.bfloat16 if HAS_KERNEL else torch.float32, str(GPU)).train()
    decoder.blocks[0].compile(backend=counted, dynamic=False)
    tokens = torch.randint(0, spec.vocab_size, (2, 60), device=GPU)
    numbers = set()
    for seed in range(4):
        documents = documents_of(2, 60, seed, 0.1 * seed).to(GPU)
        numbers.add(len(document_starts(documents)))
        loss_and_gradients(decoder, tokens, documents)
    assert len(numbers) == 4
    assert counted.frame_count == 1
