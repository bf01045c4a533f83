"""Codes fitted block after block: what they cost is measured, and too much of it puts the costliest matrices in int8."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from small_models import decoder_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CorruptFileError
from twostroke.core.schemes import SCHEMES
from twostroke.core.spec import ModelSpec
from twostroke.engine.core import EngineCore
from twostroke.engine.scoring import token_scores
from twostroke.kernels.codes import Codes
from twostroke.kernels.features import has_packed_linear
from twostroke.kernels.int4 import dequantize_groups, quantize_groups
from twostroke.kernels.matrix import quantize_columns
from twostroke.kernels.native_library import library
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.model.save import save_model
from twostroke.quantization import fitting
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.directory import Quantisation
from twostroke.quantization.fitting import Fitted, Judgement, fit_codes
from twostroke.quantization.held import held
from twostroke.quantization.load import load_any_state


def rounded(decoder: Decoder, fitted: Fitted, group: int) -> Decoder:
    result = copy.deepcopy(decoder)
    result.load_state_dict({name: fitted.source(name, tensor) for name, tensor in result.state_dict().items()})
    for name, parameter in result.named_parameters():
        if name in fitted.codes:
            parameter.data.copy_(dequantize_groups(*fitted.codes[name], group))
        elif name in fitted.int8:
            codes, scale = quantize_columns(parameter.data)
            parameter.data.copy_(codes * scale[:, None])
    return result


def in_eight_bits(decoder: Decoder) -> Decoder:
    """Rows that the blocks' matrices read are rounded to 255 steps of their largest number, as native products do."""

    def rounded_rows(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = inputs[0].abs().amax(dim=-1, keepdim=True) / 127
        return ((inputs[0] / scale).round() * scale,)

    for module in decoder.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded_rows)
    return decoder


@torch.inference_mode()
def divergence(exact: Decoder, other: Decoder, tokens: torch.Tensor) -> float:
    p, q = (m(tokens).log_softmax(-1) for m in (exact, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def learned() -> tuple[Decoder, torch.Tensor]:
    """A model that continues a pattern, and rows of it. Inputs of a trained model hang together."""
    torch.manual_seed(0)
    spec = ModelSpec("llama", 64, 2, 64, 4, 2, 16, 96, 64, tied_embeddings=True)
    decoder = Decoder(spec).train()
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 5, (24, 1), generator=generator)
    rows = (torch.arange(48) * steps + torch.randint(0, 64, (24, 1), generator=generator)) % 64
    noise = torch.rand(rows.shape, generator=generator) < 0.1
    rows = torch.where(noise, torch.randint(0, 64, rows.shape, generator=generator), rows)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=4e-3)
    for _ in range(60):
        loss = F.cross_entropy(decoder(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return decoder.eval(), rows


def test_fitted_codes_cost_less_than_the_nearest_and_what_is_reported_is_what_they_cost(
    learned: tuple[Decoder, torch.Tensor],
) -> None:
    decoder, rows = learned
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    fitted = fit_codes(decoder, rows.split(8), 32, max_kl_nats=10.0)
    assert all(torch.equal(before[name], p) for name, p in decoder.named_parameters())
    assert (len(fitted.codes), fitted.int8, fitted.n_tokens) == (8, frozenset(), 21 * 48)
    nearest = {name: Codes(*quantize_groups(before[name], 32)) for name in fitted.codes}
    judged = rows[-3:]
    others = (fitted, Fitted(nearest, frozenset(), None, 0))
    cost, of_nearest = (divergence(decoder, in_eight_bits(rounded(decoder, other, 32)), judged) for other in others)
    print(f"KL {cost:.2e}, of the nearest codes {of_nearest:.2e}")
    assert cost < 0.9 * of_nearest
    assert fitted.judgement is not None
    assert fitted.judgement.kl_nats == pytest.approx(cost, rel=1e-3)
    with torch.inference_mode():
        nats = [
            float(F.cross_entropy(m(judged)[:, :-1].flatten(0, 1), judged[:, 1:].flatten()))
            for m in (decoder, in_eight_bits(rounded(decoder, fitted, 32)))
        ]
    assert torch.tensor(fitted.judgement.perplexity_ratio).log().item() == pytest.approx(nats[1] - nats[0], abs=1e-4)


def test_more_than_is_allowed_puts_matrices_in_int8(learned: tuple[Decoder, torch.Tensor]) -> None:
    decoder, rows = learned
    batches = rows.split(8)
    free = fit_codes(decoder, batches, 64, max_kl_nats=10.0)
    assert free.judgement is not None
    allowed = free.judgement.kl_nats / 2
    held = fit_codes(decoder, batches, 64, max_kl_nats=allowed)
    assert held.judgement is not None
    assert 0 < len(held.int8) < 8
    assert held.int8.isdisjoint(held.codes)
    assert len(held.int8) + len(held.codes) == 8
    assert held.judgement.kl_nats <= allowed
    found = divergence(decoder, in_eight_bits(rounded(decoder, held, 64)), rows[-3:])
    assert held.judgement.kl_nats == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_every_family_is_walked_as_its_decoder_computes(name: str) -> None:
    decoder = decoder_of(name)
    rows = torch.randint(0, decoder.spec.vocab_size, (9, 12), generator=torch.Generator().manual_seed(3))
    fitted = fit_codes(decoder, [rows], 32, max_kl_nats=10.0)
    assert fitted.judgement is not None
    expected = divergence(decoder, in_eight_bits(rounded(decoder, fitted, 32)), rows[-1:])
    assert fitted.judgement.kl_nats == pytest.approx(expected, rel=2e-2, abs=1e-6)


@pytest.mark.skipif(not has_packed_linear(torch.bfloat16), reason="no products of bf16 here")
def test_a_large_model_is_walked_in_bf16_and_fitted_as_well(
    learned: tuple[Decoder, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, rows = learned
    monkeypatch.setattr(fitting, "LARGE_PARAMETERS", 0)
    found = fit_codes(decoder, [rows], 64, max_kl_nats=10.0)
    nearest = {name: Codes(*quantize_groups(p.detach(), 64)) for name, p in decoder.named_parameters() if name in found.codes}
    others = (found, Fitted(nearest, frozenset(), None, 0))
    costs = [divergence(decoder, in_eight_bits(rounded(decoder, fitted, 64)), rows[-3:]) for fitted in others]
    print(f"KL {costs[0]:.2e}, of the nearest codes {costs[1]:.2e}")
    assert costs[0] < costs[1]
    assert found.judgement is not None
    assert found.judgement.kl_nats == pytest.approx(costs[0], rel=0.1)  # bf16 in both streams costs little of it


def test_a_single_row_is_fitted_to_and_judges_nothing() -> None:
    decoder = decoder_of("llama")
    fitted = fit_codes(decoder, [torch.randint(0, decoder.spec.vocab_size, (1, 12))], 32)
    assert fitted.judgement is None
    assert len(fitted.codes) == 4 * decoder.spec.n_layers


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_directory_of_both_formats_opens_and_computes_with_what_was_chosen(name: str, tmp_path: Path) -> None:
    decoder = decoder_of(name, d_model=96, head_dim=16, d_ff=160)
    source = save_model(decoder, decoder.spec, tmp_path / "m")
    in_int8 = frozenset({"blocks.0.attn.qkv.weight", "blocks.1.mlp.down.weight"})
    weights = {n: p.detach() for n, p in decoder.named_parameters() if n.startswith("blocks") and p.dim() == 2}
    codes = {n: Codes(*quantize_groups(w, 32)) for n, w in weights.items() if n not in in_int8}
    fitted = Fitted(codes, in_int8, Judgement(0.01, 1.01, 10), 100)
    report = quantize_model(source, tmp_path / "q", "int4-g32", fitted=fitted)
    assert (report.n_int8_matrices, report.kl_nats, report.perplexity_ratio) == (2, 0.01, 1.01)
    stored = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert stored["format"] == "mixed-precision"
    assert held(tmp_path / "q", decoder.spec).scheme == "int4-g32"
    modules = stored["config_groups"]["group_1"]["targets"]
    assert len(modules) == (4 if name == "llama" else 2)  # q, k and v apart
    _, state = load_any_state(tmp_path / "q")
    for n in in_int8:
        assert state[n].dtype == torch.int8
        expected, scale = quantize_columns(weights[n])
        assert torch.equal(state[n], expected)
        assert torch.equal(state[n.removesuffix(".weight") + ".scale"], scale)
    opened = load_model(tmp_path / "q")
    for n, parameter in opened.named_parameters():
        if n in weights:
            torch.testing.assert_close(parameter, dict(rounded(decoder, fitted, 32).named_parameters())[n], rtol=0, atol=0)
    ids = list(range(5, 25))
    with torch.inference_mode():
        exact = opened(torch.tensor([ids]))[0].log_softmax(dim=-1)
    nats = [-float(exact[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    for runner in ("torch", "native") if library() is not None else ("torch",):
        core = EngineCore(tmp_path / "q", EngineSettings(runner=runner, n_threads=1))
        assert core.dtype == "int4"
        ((found, _),) = token_scores(core, [(ids, 1)])
        assert found.tolist() == pytest.approx(nats, rel=0.05, abs=0.1)  # bf16, and activations in int8, against fp32


def test_a_matrix_that_the_configuration_names_otherwise_than_it_is_stored_is_a_sentence(tmp_path: Path) -> None:
    decoder = decoder_of("llama", d_model=96, head_dim=16, d_ff=160)
    source = save_model(decoder, decoder.spec, tmp_path / "m")
    quantize_model(source, tmp_path / "q", "int4-g32")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    groups["group_1"] = Quantisation(SCHEMES["int8"]).config()["config_groups"]["group_0"] | {"format": "int-quantized"}
    config["quantization_config"]["format"] = "mixed-precision"
    groups["group_1"]["targets"] = ["model.layers.0.mlp.down_proj"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=r"has no tensor 'model.layers.0.mlp.down_proj.weight'"):
        load_any_state(tmp_path / "q")
