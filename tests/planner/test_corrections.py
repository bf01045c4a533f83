"""A plan of this machine multiplies each time with the factor that the machine's own runs taught, once, and says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from machines import machine, native, profile, small_llama
from twostroke.core.profile import load_profile, read_fingerprint, save_profile
from twostroke.core.rates import Correction, Corrections
from twostroke.ledger.code_version import code_version
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.explain import explain


def taught(**factors: float) -> Corrections:
    learned = tuple(Correction(quantity, factor, 9, 7, 3, 20.0, 10.0) for quantity, factor in factors.items())
    return Corrections(learned, "2026-01-02T00:00:00Z", code_version())


def training(hardware: Hardware, **factors: float) -> TrainingPlan:
    shape = TrainingShape(steps=100, batch_size=4, sequence_length=256)
    return plan_training(small_llama(), shape, dataclasses.replace(hardware, corrections=taught(**factors)))


def serving(hardware: Hardware, **factors: float) -> ServingPlan:
    shape = ServingShape(prompt_tokens=64, output_tokens=32, batch=4)
    return plan_serving(small_llama(), shape, dataclasses.replace(hardware, corrections=taught(**factors)))


@pytest.mark.parametrize(
    ("quantity", "name"),
    [("forward", "forward_s"), ("backward", "backward_s"), ("update", "optimizer_s"), ("data", "data_s"),
     ("train_startup", "startup_s")],
)  # fmt: skip
def test_a_factor_of_training_changes_its_own_time_and_no_other(quantity: str, name: str) -> None:
    before, after = training(machine()).prediction(), training(machine(), **{quantity: 1.5}).prediction()
    assert after[name] == pytest.approx(1.5 * before[name])
    others = {"forward_s", "backward_s", "optimizer_s", "data_s", "startup_s"} - {name}
    assert {other: after[other] for other in others} == {other: before[other] for other in others}


@pytest.mark.parametrize("hardware", [machine(), native()], ids=["torch", "native"])
def test_a_factor_of_serving_changes_prompts_or_steps(hardware: Hardware) -> None:
    before = serving(hardware)
    prompts, steps = serving(hardware, prefill=1.5), serving(hardware, decode=0.5)
    assert (prompts.ttft_s, prompts.tpot_s) == (pytest.approx(1.5 * before.ttft_s), before.tpot_s)
    assert (steps.ttft_s, steps.tpot_s) == (before.ttft_s, pytest.approx(0.5 * before.tpot_s))
    assert serving(hardware, serve_startup=2.0).startup_s == pytest.approx(2 * before.startup_s)


def test_a_plan_says_which_factors_it_used_and_explains_them() -> None:
    plan: Any
    for plan, factor in ((training(machine(), forward=1.5), "forward × 1.5"), (serving(native(), decode=0.5), "decode × 0.5")):
        note = next(note for note in plan.notes if "own runs" in note)
        assert factor in note
        assert "2026-01-02" in note
        assert any("learned" in term.used for term in explain(plan))
    assert not any("own runs" in note for note in plan_serving(small_llama(), ServingShape(), native()).notes)


def test_a_profile_keeps_its_corrections_and_a_plan_uses_those_of_its_own_code_only() -> None:
    stored = profile(fingerprint=read_fingerprint(), corrections=taught(decode=0.5))
    save_profile(stored)
    read = load_profile()
    assert read is not None
    assert read.corrections == stored.corrections
    assert hardware_from_profile(read).corrections.factors == {"decode": 0.5}
    other = dataclasses.replace(stored.corrections, code_version="0.0.1")
    stale = hardware_from_profile(dataclasses.replace(stored, corrections=other))
    assert stale.corrections.factors == {}
    assert any("0.0.1" in note for note in plan_serving(small_llama(), ServingShape(), stale).notes)
