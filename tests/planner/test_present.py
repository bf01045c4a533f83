"""Plans of a calibrated machine follow what else runs on it now: threads, training steps, HTTP, intervals and a note."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from machines import machine, native, profile, small_llama
from twostroke.core.crossovers import Crossovers
from twostroke.core.profile import load_profile, save_profile
from twostroke.core.rates import Conditions, Contended, FirstUses, HttpRates, NativeRates
from twostroke.planner.hardware import present as present_module
from twostroke.planner.hardware.device import Hardware, Present
from twostroke.planner.hardware.present import at_present, present_notes, training_slowdown, unsure_factor
from twostroke.planner.hardware.tables import hardware_from_profile, load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.intervals import predict_with_intervals

FACTORS = {"compiled": 1.6, "eager": 1.4, "adapters": 1.2}
TAKEN = Present(1.0, 1, 0)


def _at(hardware: Hardware, present: Present, **changes: Any) -> Hardware:
    return dataclasses.replace(hardware, present=present, **changes)


@pytest.mark.parametrize(("shape", "factor"), [
    (TrainingShape(batch_size=4, sequence_length=128), 1.6),
    (TrainingShape(batch_size=4, sequence_length=128, compile=False), 1.4),
    (TrainingShape(batch_size=4, sequence_length=128, method="lora"), 1.2),
])  # fmt: skip
def test_training_takes_as_many_times_as_long_as_was_measured_beside_a_program(shape: TrainingShape, factor: float) -> None:
    quiet = machine(contended=Contended(FACTORS))
    alone, beside = (plan_training(small_llama(), shape, one) for one in (quiet, _at(quiet, TAKEN)))
    for name in ("forward_s", "backward_s", "optimizer_s"):
        assert getattr(beside, name) == pytest.approx(factor * getattr(alone, name))
    assert beside.memory_bytes == alone.memory_bytes


def test_one_thread_that_shares_its_processor_holds_up_all() -> None:
    of_8 = dataclasses.replace(machine(contended=Contended({"compiled": 1.9})), n_cores=8)
    found = [training_slowdown(_at(of_8, Present(float(n), n, 0)), "compiled") for n in range(4)]
    assert found == [1.0, 1.9, 1.9, 1.9]


def test_a_machine_that_was_calibrated_beside_a_program_is_faster_without_it() -> None:
    contended = Contended(FACTORS)
    hardware = hardware_from_profile(profile(contended=contended, conditions=Conditions(others_used=1.0)))
    assert training_slowdown(hardware, "compiled") == 1.0  # as it was measured
    assert training_slowdown(_at(hardware, Present(0.0, 0, 1)), "compiled") == pytest.approx(1 / 1.6)


def test_the_engine_is_planned_on_the_threads_that_are_left() -> None:
    on_two = native(
        crossovers=Crossovers(one_thread_max_flop=0.0, server_row_flop=0.0),
    )
    on_two = dataclasses.replace(on_two, native=NativeRates(128e6, n_threads=2))
    always_one = dataclasses.replace(on_two, crossovers=Crossovers(one_thread_max_flop=1e15, one_thread_max_bytes=1e15))
    shape = ServingShape(scheme="bf16", prompt_tokens=64, output_tokens=16)
    plans = [plan_serving(small_llama(), shape, one).prediction() for one in (_at(on_two, TAKEN), always_one)]
    assert plans[0] == plans[1]


def test_http_is_planned_as_measured_beside_a_program() -> None:
    later = FirstUses(1e-3, 1e-3, 23, 1e-2, 1e-3)
    quiet, busy = HttpRates(1e-3, 1e-4, 1e-5), HttpRates(5e-3, 1e-4, 1e-5)
    stored = profile(http=quiet, contended=Contended(http=busy, first_uses=later))
    assert hardware_from_profile(stored).http == quiet
    assert hardware_from_profile(stored, TAKEN).http == busy
    assert hardware_from_profile(stored, TAKEN).first_uses == later
    assert hardware_from_profile(stored).first_uses is None
    assert hardware_from_profile(profile(http=quiet), TAKEN).http == quiet  # not measured


def test_a_part_of_a_processor_widens_intervals_upward() -> None:
    quiet = machine(contended=Contended(FACTORS))
    partly = _at(quiet, Present(0.4, 0, 0))
    assert unsure_factor(quiet, "train") == unsure_factor(_at(quiet, TAKEN), "train") == unsure_factor(quiet, "serve") == 1.0
    assert unsure_factor(_at(quiet, TAKEN), "serve") == 2.0  # a short step may share its processor
    assert unsure_factor(partly, "train") == unsure_factor(partly, "serve") == pytest.approx(1.6)
    found, wider = (predict_with_intervals({"step_time_s": 1.0, "weights_bytes": 1.0}, one, "train") for one in (quiet, partly))
    assert wider["step_time_s"]["high"] == pytest.approx(1.6 * found["step_time_s"]["high"])
    assert wider["step_time_s"]["low"] == found["step_time_s"]["low"]
    assert wider["weights_bytes"] == found["weights_bytes"]


def test_plans_say_what_runs() -> None:
    quiet = machine()
    assert not present_notes(quiet)
    (note,) = present_notes(_at(quiet, TAKEN))
    assert "1.0 of 2 processors busy" in note
    assert "counts on 1" in note
    shape = TrainingShape(batch_size=4, sequence_length=128)
    assert note in plan_training(small_llama(), shape, _at(quiet, TAKEN)).notes


def test_only_this_machine_is_looked_at_and_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    busy = SimpleNamespace(used=1.0)
    monkeypatch.setattr(present_module, "recently", lambda: looked.append(1.0) or busy)
    here = load_fingerprinted()
    hardware_from_profile(here)
    load_hardware("h100")
    assert load_hardware("this", "train").present == Present()  # as tests plan
    assert not looked
    monkeypatch.setenv("TWOSTROKE_AS_CALIBRATED", "0")
    n = here.fingerprint.n_cores
    assert load_hardware("this", "train").present.processors_taken == min(1, n - 1)
    assert looked
    looked.clear()
    assert at_present(dataclasses.replace(here, device="cuda")) == Present()
    assert not looked


def load_fingerprinted() -> Any:
    """A profile that is stored as this machine's."""
    from twostroke.core.profile import read_fingerprint

    save_profile(profile(fingerprint=read_fingerprint()))
    return load_profile()
