"""The prediction of a run is made for the device that its steps will run on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twostroke.core.profile import MachineProfile, save_profile
from twostroke.training.ranks import alone
from twostroke.training.start import hardware_of, start


def test_a_run_is_predicted_for_the_device_that_trains_and_for_no_other(profile: MachineProfile) -> None:
    """``profile`` is stored as the CPU's, with both engines measured there."""
    machine, _ = hardware_of(torch.device("cpu"))
    assert machine is not None
    assert machine.kind == "cpu"
    machine, why_not = hardware_of(torch.device("cuda", 0))
    assert machine is None
    assert "no measurement of training on cuda, only of training on cpu, serving on cpu. Run `twostroke calibrate`" in why_not
    save_profile(replace(profile, device="cuda", engines=("train",)))
    machine, _ = hardware_of(torch.device("cuda", 0))
    assert machine is not None
    assert machine.kind == "gpu"
    machine, _ = hardware_of(torch.device("cpu"))
    assert machine is not None
    assert machine.kind == "cpu"


def test_runs_beside_it_are_in_its_share_and_no_other_programs(
    make_recipe: Any, profile: MachineProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned_s(name: str, beside: int, processors_used: float) -> float:
        monkeypatch.setattr("twostroke.planner.hardware.present.recently", lambda: SimpleNamespace(used=processors_used))
        return float(start(make_recipe(name), ranks=alone(beside)).entry.prediction["step_time_s"])

    if profile.fingerprint.n_cores < 2:
        pytest.skip("one processor is no part of a machine")
    monkeypatch.setenv("TWOSTROKE_AS_CALIBRATED", "0")
    idle, busy = planned_s("idle", 0, 0.0), planned_s("busy", 0, 1.0)
    assert busy > idle
    shared = planned_s("shared", 1, 0.0)
    assert shared > idle
    assert planned_s("shared-beside-a-run", 1, 1.0) == pytest.approx(shared)


def test_runs_beside_each_other_pay_for_one_machine_together(make_recipe: Any, profile: MachineProfile) -> None:
    for beside in (0, 1):
        entry = start(make_recipe(f"beside-{beside}"), ranks=alone(beside)).entry
        assert entry.planned.hardware is not None
        price = entry.planned.hardware.usd_per_hour.value
        for spent in (entry.prediction, entry.spent({"train_time_s": entry.prediction["train_time_s"]})):
            assert spent["cost_usd"] == pytest.approx(entry.prediction["train_time_s"] / 3600 * price / (1 + beside))
