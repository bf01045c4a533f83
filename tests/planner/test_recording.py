"""A run is frozen before it begins and measured after it, and neither a plan nor a ledger that fails stops it."""

from __future__ import annotations

import pytest

from machines import machine
from twostroke.core.errors import ConfigError
from twostroke.core.paths import ledger_path
from twostroke.ledger.meter import NO_COUNTER, Counter, Meter
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


# -- energy and money ------------------------------------------------------------------------------------------------------


def served() -> Planned:
    return Planned({"output_tok_per_s": 100.0}, machine())


def test_energy_and_money_are_predicted_with_every_rate_and_time() -> None:
    """Two cores at 4.2 W and 0.04 $ an hour, at their limit where the plan knows no better."""
    run = begun([], served)
    assert run.prediction["energy_per_mtok_kwh"] == pytest.approx(8.4 * 1e4 / 3.6e6)
    assert run.prediction["cost_per_mtok_usd"] == pytest.approx(0.08 / 3600 * 1e4)
    assert "energy_per_mtok_kwh" in Ledger().get(run.run_id or "").prediction
    timed = begun([], lambda: Planned({"elapsed_s": 3600.0, "energy_kwh": 0.001}, machine()))
    assert timed.prediction["cost_usd"] == pytest.approx(0.08)
    assert timed.prediction["energy_kwh"] == 0.001  # the plan's own


def test_measured_energy_is_the_counters_power_times_the_measured_time() -> None:
    joules = iter([0, 50_000_000])  # before and after
    run = begun([], served)
    run.meter = Meter([Counter("package-0", lambda: next(joules))])
    with run.meter:
        pass
    run.meter.seconds, run.meter._counters = 10.0, [Counter("package-0", lambda: 0)]  # 50 J in 10 s
    run.measure({"output_tok_per_s": 50.0})
    found = Ledger().get(run.run_id or "").measurement
    assert found["energy_per_mtok_kwh"] == pytest.approx(5.0 * 2e4 / 3.6e6)
    assert found["cost_per_mtok_usd"] == pytest.approx(0.08 / 3600 * 2e4)
    assert "not_measured" not in found


def test_energy_that_no_counter_measures_is_said_in_the_run() -> None:
    run = begun([], served)
    run.meter = Meter([], NO_COUNTER)
    with run.meter:
        pass
    run.measure({"output_tok_per_s": 50.0})
    found = Ledger().get(run.run_id or "").measurement
    assert found["cost_per_mtok_usd"] > 0
    assert found["not_measured"] == {"energy_per_mtok_kwh": NO_COUNTER}


def test_a_run_on_several_devices_is_billed_for_all_of_them_before_and_after() -> None:
    one, two = (begun([], lambda n=n: Planned({"scored_tok_per_s": 100.0}, machine(), n_devices=n)) for n in (1, 2))
    for name in ("cost_per_mtok_usd", "energy_per_mtok_kwh"):
        assert two.prediction[name] == pytest.approx(2 * one.prediction[name])
    paid = [run.spent({"scored_tok_per_s": 100.0})["cost_per_mtok_usd"] for run in (one, two)]
    assert paid[1] == pytest.approx(2 * paid[0])
    assert two.prediction["cost_per_mtok_usd"] == pytest.approx(paid[1])


def test_runs_that_share_a_machine_are_billed_for_all_of_it_together() -> None:
    """A counter reads the whole machine: each of two runs beside each other has half of what it says."""
    alone, half = (begun([], lambda n=n: Planned({"train_time_s": 10.0}, machine(), n_devices=n)) for n in (1, 0.5))
    for name in ("cost_usd", "energy_kwh"):
        assert half.prediction[name] == pytest.approx(alone.prediction[name] / 2)
    for run in (alone, half):
        run.meter = Meter([Counter("package-0", lambda: 0)])
        run.meter.seconds, run.meter._uj = 10.0, 50_000_000
    whole, part = (run.spent({"train_time_s": 10.0}) for run in (alone, half))
    assert whole["energy_kwh"] == pytest.approx(50.0 / 3.6e6)
    assert part == {name: pytest.approx(value / 2) for name, value in whole.items()}
