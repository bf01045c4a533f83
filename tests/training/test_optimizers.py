from __future__ import annotations

import dataclasses

import pytest
import torch

from twostroke.core.errors import CorruptFileError
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.model.decoder import Decoder
from twostroke.training.muon import muon_class
from twostroke.training.optimizers import MUON_MOMENTUM, Optimizers, matrix_parts
from twostroke.training.precision import MasterWeights

SPEC = ModelSpec("llama", 40, 2, 16, 4, 2, 4, 24, 32)  # grouped queries, so that q, k and v differ in size


def _settings(optimizer: str = "muon", weight_decay: float = 0.1) -> TrainSettings:
    return TrainSettings(steps=10, optimizer=optimizer, learning_rate=1e-3, muon_learning_rate=0.02, weight_decay=weight_decay)


def _masters() -> MasterWeights:
    return MasterWeights(Decoder(SPEC), torch.float32)


def _fill_gradients(masters: MasterWeights, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for gradient in masters.gradients.values():
        gradient.normal_(generator=generator)


@pytest.mark.parametrize(("name", "rows"), [("attn.qkv", [16, 8, 8]), ("mlp.gate_up", [24, 24])])
def test_muon_orthogonalises_each_packed_matrix_alone(name: str, rows: list[int]) -> None:
    masters = _masters()
    key = f"blocks.1.{name}.weight"
    expected = [torch.nn.Parameter(part.clone()) for part in masters.weights[key].split(rows)]
    whole = torch.nn.Parameter(masters.weights[key].clone())
    optimizers = Optimizers(masters, SPEC, _settings())
    arguments = {"lr": 0.02, "weight_decay": 0.1, "momentum": MUON_MOMENTUM, "adjust_lr_fn": "original"}
    reference, packed = muon_class("cpu")(expected, **arguments), muon_class("cpu")([whole], **arguments)
    for seed in range(3):
        _fill_gradients(masters, seed)
        for part, gradient in zip(expected, masters.gradients[key].split(rows), strict=True):
            part.grad = gradient.clone()
        whole.grad = masters.gradients[key].clone()
        optimizers.step(1.0)
        reference.step()
        packed.step()
    assert torch.equal(masters.weights[key], torch.cat(list(expected)))
    assert not torch.allclose(masters.weights[key], whole, atol=1e-3)


def test_every_experts_factor_is_a_matrix_of_its_own() -> None:
    spec = dataclasses.replace(SPEC, family="mixtral", moe=MoeSpec(3, 1, 24))
    assert matrix_parts("blocks.0.mlp.expert_down.adapters.down_proj.a", 12, spec) == {"0": 4, "1": 4, "2": 4}
    assert matrix_parts("blocks.0.attn.qkv.adapters.q_proj.b", 16, spec) == {}


def test_parts_of_a_packed_matrix_are_all_of_its_rows() -> None:
    for name, weight in _masters().weights.items():
        rows = matrix_parts(name, len(weight), SPEC)
        assert not rows or sum(rows.values()) == weight.shape[0]


def test_adamw_is_torchs_plain_one() -> None:
    masters = _masters()
    names = list(masters.weights)
    decayed = [n for n in names if masters.weights[n].dim() == 2 and n != "embed.weight"]
    copies = {name: torch.nn.Parameter(weight.clone()) for name, weight in masters.weights.items()}
    groups = [
        {"params": [copies[n] for n in decayed], "weight_decay": 0.1},
        {"params": [copies[n] for n in names if n not in decayed], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    optimizers = Optimizers(masters, SPEC, _settings("adamw"))
    for seed in range(3):
        _fill_gradients(masters, seed)
        for name, copy in copies.items():
            copy.grad = masters.gradients[name].clone()
        optimizers.step(1.0)
        reference.step()
    for name, copy in copies.items():
        # the fused kernel rounds its fp32 products in another order
        torch.testing.assert_close(masters.weights[name], copy.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_spares_norms_and_embeddings(optimizer: str) -> None:
    masters = _masters()
    before = {name: weight.clone() for name, weight in masters.weights.items()}
    Optimizers(masters, SPEC, _settings(optimizer, weight_decay=0.5)).step(1.0)  # all gradients are zero
    for name, weight in masters.weights.items():
        decays = weight.dim() == 2 and name != "embed.weight"
        assert torch.equal(weight, before[name]) != decays, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_restored_state_continues_bit_for_bit(optimizer: str) -> None:
    first, second = _masters(), _masters()
    trained, fresh = (Optimizers(m, SPEC, _settings(optimizer)) for m in (first, second))
    for seed in range(3):
        _fill_gradients(first, seed)
        trained.step(0.5)
    second.load(first.weights)
    saved = {key: value.clone() for key, value in trained.state().items()}
    fresh.load_state(saved)
    for masters, optimizers in ((first, trained), (second, fresh)):
        _fill_gradients(masters, 9)
        optimizers.step(0.7)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert all(torch.equal(a, b) for a, b in zip(trained.state().values(), fresh.state().values(), strict=True))


def test_muon_holds_one_moment_for_matrices_and_adamw_two() -> None:
    for optimizer, moments in (("muon", 1), ("adamw", 2)):
        masters = _masters()
        optimizers = Optimizers(masters, SPEC, _settings(optimizer))
        assert optimizers.state_bytes == 0
        optimizers.step(1.0)
        in_blocks = sum(w.numel() for n, w in masters.weights.items() if n.startswith("blocks.") and w.dim() == 2)
        rest = sum(w.numel() for w in masters.weights.values()) - in_blocks
        steps = sum(1 for key in optimizers.state() if key.endswith("::step"))
        assert optimizers.state_bytes == 4 * (moments * in_blocks + 2 * rest + steps)


def test_state_of_another_optimizer_is_refused_by_name() -> None:
    muon, adamw = (Optimizers(_masters(), SPEC, _settings(name)) for name in ("muon", "adamw"))
    muon.step(1.0)
    with pytest.raises(CorruptFileError, match=r"blocks\.0\.attn\.qkv\.weight"):
        adamw.load_state(muon.state())
    partial = {k: v for k, v in muon.state().items() if not k.startswith("embed")}
    with pytest.raises(CorruptFileError, match=r"lacks 'embed\.weight'"):
        muon.load_state(partial)


def test_learning_rate_factor_scales_the_update() -> None:
    changes = []
    for factor in (0.0, 1.0, 0.5):
        masters = _masters()
        before = masters.weights["blocks.0.attn.out.weight"].clone()
        optimizers = Optimizers(masters, SPEC, _settings("muon", weight_decay=0.0))
        _fill_gradients(masters, 1)
        optimizers.step(factor)
        changes.append((masters.weights["blocks.0.attn.out.weight"] - before).norm().item())
    assert changes[0] == 0
    assert changes[2] == pytest.approx(changes[1] / 2, rel=1e-4)  # fp32 weights minus fp32 weights
