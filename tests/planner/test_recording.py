"""A run is frozen before it begins and measured after it, and neither a plan nor a ledger that fails stops it."""

from __future__ import annotations

import pytest

from machines import machine
from twostroke.core.errors import ConfigError
from twostroke.core.paths import ledger_path
from twostroke.ledger.store import Ledger
from twostroke.planner.truth.recording import Planned, Recording, recording
from twostroke.planner.truth.restated import WAITED


def planned() -> Planned:
    return Planned({"ttft_s": 0.5, "tpot_s": 0.01}, machine(), {"shape": {"batch": 2}})


def begun(said: list[str], plan: object = planned) -> Recording:
    return recording("bench", "a model", {"users": 3}, plan, said.append)  # type: ignore[arg-type]


def test_a_run_is_frozen_with_its_inputs_and_measured_with_reasons_for_what_is_missing() -> None:
    said: list[str] = []
    with begun(said) as run:
        assert run.run_id is not None
        frozen = Ledger().get(run.run_id)
        assert frozen.inputs == {"users": 3, "shape": {"batch": 2}, "device": machine().label}
        assert frozen.prediction["ttft_s"]["value"] == run.prediction["ttft_s"] == 0.5
        run.measure({"ttft_s": 0.6}, "partial")
        run.measure({"e2e_s": 1.0}, why={"tpot_s": "one token was asked for."})
    done = Ledger().get(run.run_id)
    assert done.status == "finished"
    measured = {"ttft_s": 0.6, "e2e_s": 1.0, "not_measured": {"tpot_s": "one token was asked for."}}
    waited = done.measurement.get(WAITED, 0.0)
    assert {name: value for name, value in done.measurement.items() if name != WAITED} == measured
    assert 0.0 <= waited <= 1.0
    assert said == []


def test_a_run_that_breaks_off_is_measured_as_failed_unless_it_was_measured_before() -> None:
    runs = [begun([]), begun([])]
    runs[1].measure({"ttft_s": 1.0}, "partial")
    for run in runs:
        with pytest.raises(KeyboardInterrupt), run:
            raise KeyboardInterrupt
    assert [Ledger().get(run.run_id or "").status for run in runs] == ["failed", "partial"]


def test_a_run_without_a_plan_is_recorded_and_says_why() -> None:
    def refused() -> Planned:
        raise ConfigError("this machine has no profile yet.")

    said: list[str] = []
    run = begun(said, refused)
    assert said == ["no prediction: this machine has no profile yet."]
    assert (run.prediction, run.planned.hardware) == ({}, None)
    assert Ledger().get(run.run_id or "").prediction == {}
    assert begun(said, None).run_id is not None
    assert len(said) == 1


def test_a_ledger_that_cannot_be_written_is_said_and_stops_nothing() -> None:
    ledger_path().parent.mkdir(parents=True, exist_ok=True)
    ledger_path().write_bytes(b"not a database" * 100)
    said: list[str] = []
    with begun(said) as run:
        run.measure({"ttft_s": 1.0})
    assert run.run_id is None
    assert run.prediction["ttft_s"] == 0.5
    assert len(said) == 1
    assert said[0].startswith("the ledger could not be written: ")
