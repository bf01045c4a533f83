"""Processors on which torch multiplies bf16 slowly: mixed bf16 is computed, planned and resumed in fp32, and Muon is too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twostroke.core import policy
from twostroke.core.errors import Interrupted
from twostroke.core.policy import computed_type, multiplies_bf16
from twostroke.core.profile import MachineProfile, save_profile
from twostroke.planner.hardware.tables import hardware_from_profile, load_hardware
from twostroke.planner.training.shape import TrainingShape
from twostroke.training import muon, start
from twostroke.training.muon import MuonInFp32, muon_class, orthogonalised


@pytest.mark.parametrize(
    ("kind", "features", "expected"),
    [
        ("cpu", ("avx2",), "fp32"),
        ("cpu", ("avx2", "avx_vnni"), "fp32"),
        ("cpu", ("asimd",), "fp32"),
        ("cpu", ("asimd", "bf16"), "bf16"),
        ("cpu", ("avx2", "avx512f"), "bf16"),
        ("cuda", ("avx2",), "bf16"),
    ],
)
def test_mixed_bf16_is_computed_in_what_is_fast(kind: str, features: tuple[str, ...], expected: str) -> None:
    multiplies = multiplies_bf16(kind, features)
    assert computed_type("bf16", multiplies) == expected
    for given in ("fp32", "fp16", "pure_bf16"):
        assert computed_type(given, multiplies) == given


def of_processor(monkeypatch: pytest.MonkeyPatch, multiplies: bool) -> None:
    for module in (policy, start, muon):
        monkeypatch.setattr(module, "multiplies_bf16", lambda *of: multiplies)


def test_a_run_goes_on_in_the_type_in_which_it_began(make_recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is written in the recipe's type. A resume on another processor changes nothing."""
    recipe, said = make_recipe("resumed", checkpoint_every=2), list[str]()
    assert recipe.train.dtype == "bf16"
    of_processor(monkeypatch, False)
    with pytest.raises(Interrupted):
        start.train(recipe, log=said.append, should_stop=lambda step: step == 2)
    assert any("is computed in fp32" in line for line in said)
    assert json.loads((Path(recipe.output) / "recipe.json").read_text())["resolved"]["dtype"] == "fp32"
    of_processor(monkeypatch, True)
    done = start.train(recipe, resume=True)
    assert done.summary["compute_dtype"] == "fp32"
    assert {t.dtype for t in load_file(done.model / "model.safetensors").values()} == {torch.bfloat16}
    assert start.train(make_recipe("bf16")).summary["compute_dtype"] == "bf16"
    of_processor(monkeypatch, False)
    for name, dtype in (("whole", "bf16"), ("fp32", "fp32")):
        other = start.train(make_recipe(name, dtype=dtype))
        assert other.summary["weights_sha256"] == done.summary["weights_sha256"]


def test_a_type_without_a_rate_is_trained_without_a_prediction(make_recipe, profile: MachineProfile) -> None:
    save_profile(replace(profile, peak_flop_per_s={"fp32": 1e11}))
    said: list[str] = []
    done = start.train(make_recipe(dtype="pure_bf16"), log=said.append)
    assert done.summary["compute_dtype"] == "bf16"
    assert not done.summary["prediction"]
    assert any("no prediction and no MFU: this machine's profile has no rate of products in bf16" in line for line in said)


def test_plans_of_such_a_machine_count_fp32(profile: MachineProfile) -> None:
    profile = replace(profile, peak_flop_per_s={"fp32": 1e11, "bf16": 2e11})
    known = hardware_from_profile(profile)
    lacking = hardware_from_profile(
        replace(profile, peak_flop_per_s={k: v for k, v in profile.peak_flop_per_s.items() if k != "bf16"})
    )
    asked = TrainingShape(steps=1)
    assert asked.on(known) == asked
    assert asked.on(load_hardware("h100")) == asked
    found = asked.on(lacking)
    assert (found.dtype, found.saved_dtype) == ("fp32", "bf16")
    assert found.on(lacking) == found
    assert replace(asked, dtype="pure_bf16").on(lacking).dtype == "pure_bf16"


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_in_fp32_is_torchs_but_for_rounding(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch orthogonalises in bf16, so its steps differ by some per cent; the momentum is the same to the bit."""
    generator = torch.Generator().manual_seed(0)
    start_from = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(3)]
    weights, momenta = [], []
    for kind in (torch.optim.Muon, MuonInFp32):
        weight = torch.nn.Parameter(start_from.clone())
        optimizer = kind([weight], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="original")
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        weights.append(weight.detach() - start_from)
        momenta.append(optimizer.state[weight]["momentum_buffer"])
    assert torch.equal(*momenta)
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 0.02
    for multiplies, expected in ((True, torch.optim.Muon), (False, MuonInFp32)):
        of_processor(monkeypatch, multiplies)
        assert muon_class("cpu") is expected


def test_orthogonalising_brings_singular_values_near_one() -> None:
    matrix = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
