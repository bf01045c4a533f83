"""Scaled inputs: the model stays what it is, the search finds what a plain one finds, and the copy computes what was fitted."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from small_models import EVERY, decoder_of, saved
from twostroke.kernels.int4 import dequantize_groups, quantize_groups
from twostroke.model.adapter_directory import scales_inputs
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.quantization.awq import EXPONENTS, fold_scales, folds, search_scales, shared
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.fitting import fit_codes
from twostroke.quantization.roundings import ROUNDINGS

AWQ = ROUNDINGS["awq"]


@torch.inference_mode()
def logits(decoder: Decoder) -> torch.Tensor:
    ids = torch.randint(0, decoder.spec.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    return decoder(ids)


def folded(decoder: Decoder) -> tuple[Decoder, list[tuple[str, str]]]:
    """A copy with all of its inputs scaled at random, and what was folded."""
    result, done = copy.deepcopy(decoder), []
    generator = torch.Generator().manual_seed(2)
    for i, block in enumerate(result.blocks):
        for fold in folds(decoder.spec, i):
            scale = torch.exp2(4 * torch.rand(fold.rows.shape, generator=generator) - 2)
            fold_scales(block, fold, shared(fold, scale))
            done.append((fold.source, fold.reader))
    return result, done


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_folded_model_computes_what_it_did(name: str) -> None:
    decoder = decoder_of(name)
    other, done = folded(decoder)
    changed = [n for n, tensor in decoder.tensors.items() if not torch.equal(tensor, other.tensors[n])]
    assert bool(done) == bool(changed)
    before, after = logits(decoder), logits(other)
    torch.testing.assert_close(after, before, rtol=2e-4, atol=2e-4 * float(before.abs().max()))


def test_what_cannot_be_folded_exactly_is_left_alone() -> None:
    readers = {name: {fold.reader for fold in folds(EVERY[name], 1)} for name in EVERY}
    assert readers["llama"] == {"attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"}
    assert readers["gpt2"] == {"attn.qkv", "attn.out", "mlp.up"}  # behind a GELU nothing is linear
    assert readers["olmo2"] == {"attn.out", "mlp.down"}  # its norms come after the matrices
    assert readers["mixtral"] == {"attn.qkv", "attn.out", "mlp.expert_down"}  # routers read the norm too
    assert readers["gpt_oss"] == {"attn.qkv", "attn.out"}  # its product of gate and up is clamped
    assert readers["deepseek_v3"] == {"mlp.expert_down", "mlp.shared_down"}


def test_the_search_finds_scales_that_lose_less_of_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator) * torch.exp(torch.randn(64, generator=generator))
    weight = torch.randn(48, 64, generator=generator)
    found = search_scales(weight, x.t() @ x, x.abs().mean(dim=0), 32)
    assert found is not None

    def lost(scale: torch.Tensor) -> float:
        rounded = dequantize_groups(*quantize_groups(weight * scale, 32), 32) / scale
        return float((x @ (rounded - weight).t()).square().sum())

    assert lost(found) < 0.9 * lost(torch.ones(64))
    sizes = x.abs().mean(dim=0)
    exponent = torch.linalg.lstsq(sizes.log()[:, None] - sizes.log().mean(), found.log()[:, None] - found.log().mean()).solution
    assert min(abs(float(exponent) - one) for one in EXPONENTS) < 1e-4
    assert search_scales(weight, torch.eye(64), torch.ones(64), 32) is None


@pytest.mark.parametrize("rounding", ["awq", "awq-gptq"])
@pytest.mark.parametrize("name", ["llama-scaled", "gpt2", "gemma2", "mixtral"])
def test_a_scaled_copy_is_the_model_that_was_fitted(name: str, rounding: str, tmp_path: Path) -> None:
    decoder, source = saved(name, tmp_path / "m", **({"d_model": 96} if name in ("llama-scaled", "mixtral") else {}))
    rows = torch.randint(0, decoder.spec.vocab_size, (18, 32), generator=torch.Generator().manual_seed(3))
    fitted = fit_codes(decoder, [rows], 32, max_kl_nats=100.0, rounding=ROUNDINGS[rounding])
    assert fitted.scaled
    report = quantize_model(source, tmp_path / "q", "int4-g32", fitted=fitted)
    assert report.relative_error < 0.15
    assert scales_inputs(tmp_path / "q")
    assert not scales_inputs(source)
    opened = load_model(tmp_path / "q")
    for canonical, codes in fitted.codes.items():
        assert torch.equal(opened.tensors[canonical], codes.values()), canonical
    for canonical, norm in fitted.norms.items():
        assert torch.equal(opened.tensors[canonical], norm.bfloat16().float()), canonical
    with torch.inference_mode():
        p, q = (m(rows[-2:]).log_softmax(-1) for m in (decoder, opened))
    assert fitted.judgement is not None
    found = float((p.exp() * (p - q)).sum(-1).mean())  # of activations that are not rounded, and embeddings in bf16
    assert found == pytest.approx(fitted.judgement.kl_nats, rel=0.5)


def test_a_matrix_in_int8_is_scaled_as_its_neighbours_are(tmp_path: Path) -> None:
    decoder, source = saved("llama", tmp_path / "m", d_model=96)
    rows = torch.randint(0, decoder.spec.vocab_size, (18, 32), generator=torch.Generator().manual_seed(3))
    free = fit_codes(decoder, [rows], 32, max_kl_nats=100.0, rounding=AWQ)
    assert free.judgement is not None
    held = fit_codes(decoder, [rows], 32, max_kl_nats=free.judgement.kl_nats / 3, rounding=AWQ)
    assert held.judgement is not None
    assert 0 < len(held.int8) <= 12
    assert held.judgement.kl_nats <= free.judgement.kl_nats / 3
    assert any(name in held.scaled for name in held.int8)
    report = quantize_model(source, tmp_path / "q", "int4-g32", fitted=held)
    assert report.n_int8_matrices == len(held.int8)
    opened = load_model(tmp_path / "q")
    with torch.inference_mode():
        p, q = (m(rows[-2:]).log_softmax(-1) for m in (decoder, opened))
    assert float((p.exp() * (p - q)).sum(-1).mean()) < free.judgement.kl_nats
