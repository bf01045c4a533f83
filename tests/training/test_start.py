"""The prediction of a run is made for the device that its steps will run on."""

from __future__ import annotations

from dataclasses import replace

import torch

from twostroke.core.profile import MachineProfile, save_profile
from twostroke.training.start import hardware_of


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
