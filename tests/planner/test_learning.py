"""`ledger fit` finds what a machine's constants are off by, shrinks it, forgets, and adopts only what helps later runs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest

from machines import profile, small_llama
from twostroke.cli.main import main
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.paths import ledger_path
from twostroke.core.profile import MachineProfile, load_profile, profile_path, read_fingerprint, save_profile
from twostroke.core.rates import Correction, Corrections
from twostroke.ledger.code_version import code_version
from twostroke.ledger.store import Ledger, Measurement, Run
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.intervals import Range, own_pairs
from twostroke.planner.truth.learning import (
    HALF_LIFE_RUNS,
    LEAST_CONFIGURATIONS,
    WAITED,
    Lesson,
    counting,
    error_percent,
    factor_of,
    fit,
    fit_ledger,
)
from twostroke.planner.truth.recording import Planned, freeze
from twostroke.planner.truth.restated import CORRECTIONS, restated

PRIOR = Range(-0.3, 0.3, "assumed", 0, "a test")
PASSES = {"forward": "forward_s", "backward": "backward_s", "update": "optimizer_s", "data": "data_s"}


@pytest.fixture
def here() -> MachineProfile:
    found = profile(fingerprint=read_fingerprint())
    save_profile(found)
    return found


def planned(hardware: Hardware, n: int) -> dict[str, Any]:
    shape = TrainingShape(steps=100, batch_size=4, sequence_length=256)
    return dict(plan_training(small_llama(n_layers=1 + n % 11), shape, hardware).prediction())


def trained(
    of: MachineProfile,
    n: int,
    truth: Mapping[str, float],
    seed: int = 0,
    factors: Mapping[str, float] | None = None,
    **changes: Any,
) -> Run:
    """Run number ``n`` of a machine whose passes take ``truth`` times what calibration plans, give or take 5%; planned with
    the corrections ``factors``."""
    base = hardware_from_profile(of)
    learned = tuple(Correction(name, factor, 9, 7, 3, 20.0, 10.0) for name, factor in (factors or {}).items())
    hardware = dataclasses.replace(base, corrections=Corrections(learned, "2026-01-02T00:00:00Z", code_version()))
    noise = random.Random(f"{n} {seed}")
    right = planned(base, n)
    measured = {name: right[name] * truth.get(part, 1.0) * math.exp(noise.gauss(0, 0.05)) for part, name in PASSES.items()}
    measured["step_time_s"] = sum(measured.values())
    inputs = {"device": hardware.label, "steps": 100, **({CORRECTIONS: dict(factors)} if factors else {})}
    values: dict[str, Any] = {
        "run_id": f"train-{n}", "kind": "train", "subject": "a run", "frozen_at": f"2026-02-01T00:{n:02}:00.000Z",
        "code_version": code_version(), "fingerprint": of.fingerprint.key, "inputs": inputs,
        "prediction": planned(hardware, n), "measurements": (Measurement("2026-02-02T00:00:00Z", "finished", measured, None),),
    }  # fmt: skip
    return Run(**(values | changes))


def adopted(runs: list[Run], of: MachineProfile) -> dict[str, float]:
    return fit(runs, of).corrected.corrections.factors


# -- the formula ----------------------------------------------------------------------------------------------------------


def test_the_factor_is_shrunk_towards_calibration_and_comes_to_the_truth_with_runs() -> None:
    factors = [factor_of([Lesson(0.5, 1.0, str(i)) for i in range(n)], PRIOR) for n in (0, 1, 5, 50)]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    assert factors[1] == pytest.approx(math.exp(0.25))  # one run weighs as much as calibration
    assert factors[3] == pytest.approx(math.exp(0.5), rel=0.02)


def test_runs_that_contradict_each_other_move_it_less() -> None:
    agreeing = [Lesson(0.3, 1.0, str(i)) for i in range(8)]
    scattered = [Lesson(0.3 + (-1) ** i * 0.6, 1.0, str(i)) for i in range(8)]
    assert 1.0 < factor_of(scattered, PRIOR) < factor_of(agreeing, PRIOR)


def test_many_runs_of_one_configuration_count_as_one() -> None:
    several = [Lesson(0.5, 1.0, str(i)) for i in range(5)]
    assert factor_of([*several, *[Lesson(-2.0, 1.0, "the same")] * 90], PRIOR) == factor_of(
        [*several, Lesson(-2.0, 1.0, "the same")], PRIOR
    )


def test_disturbed_runs_weigh_less() -> None:
    quiet = [Lesson(0.0, 1.0, str(i)) for i in range(6)]
    assert factor_of([*quiet, Lesson(1.0, 0.1, "x")], PRIOR) < factor_of([*quiet, Lesson(1.0, 1.0, "x")], PRIOR)
    assert factor_of([*quiet, Lesson(1.0, 0.0, "x")], PRIOR) == 1.0


def test_the_error_is_a_factor_either_way() -> None:
    assert error_percent([math.log(2.0)]) == pytest.approx(error_percent([-math.log(2.0)])) == pytest.approx(100.0)


# -- runs of a machine ----------------------------------------------------------------------------------------------------


def test_a_machine_whose_updates_are_slow_is_corrected_and_the_newest_runs_show_it(here: MachineProfile) -> None:
    found = fit([trained(here, n, {"update": 2.0}) for n in range(20)], here)
    update = next(one for one in found.quantities if one.quantity == "update")
    assert update.is_adopted
    assert update.n_held_out == 6
    assert update.factor == pytest.approx(2.0, rel=0.15)
    assert update.before_percent == pytest.approx(100, rel=0.2)
    assert update.after_percent is not None
    assert update.after_percent < 20
    assert next(total for total in found.totals if total.name == "step_time_s").n_held_out == 6
    assert all(total.after_percent <= total.before_percent for total in found.totals)


def test_a_correction_that_does_not_help_later_runs_is_refused(here: MachineProfile) -> None:
    changed = [trained(here, n, {"update": 2.0 if n < 14 else 1.0}) for n in range(20)]
    update = next(one for one in fit(changed, here).quantities if one.quantity == "update")
    assert not update.is_adopted
    assert update.why == "it does not help the held-out runs"
    assert "update" not in adopted(changed, here)


def test_a_correction_that_makes_its_total_worse_is_refused(here: MachineProfile) -> None:
    """Updates twice as slow as planned, hidden by a step whose rest was measured as much shorter: correcting one part alone
    would spoil a total that was right."""

    def right_in_sum(n: int) -> Run:
        run = trained(here, n, {"update": 2.0, "data": 1.0})
        whole = planned(hardware_from_profile(here), n)["step_time_s"]
        values = run.measurements[0].values | {"step_time_s": whole}
        return dataclasses.replace(run, measurements=(dataclasses.replace(run.measurements[0], values=values),))

    runs = [right_in_sum(n) for n in range(20)]
    update = next(one for one in fit(runs, here).quantities if one.quantity == "update")
    assert not update.is_adopted
    assert "step_time_s" in update.why


def test_old_runs_fade(here: MachineProfile) -> None:
    aged = [trained(here, n % 60, {"update": 3.0 if n < 40 else 1.5}, frozen_at=f"2026-02-{1 + n // 24:02}T{n % 24:02}:00:00Z")
            for n in range(40 + 3 * HALF_LIFE_RUNS)]  # fmt: skip
    update = next(one for one in fit(aged, here).quantities if one.quantity == "update")
    assert update.factor == pytest.approx(1.5, rel=0.15)


def test_a_few_configurations_are_not_enough_and_one_again_and_again_is_not_either(here: MachineProfile) -> None:
    few = [trained(here, n, {"update": 2.0}) for n in range(LEAST_CONFIGURATIONS)]
    same = [trained(here, 0, {"update": 2.0}, seed, frozen_at=f"2026-02-01T00:{seed:02}:00Z") for seed in range(30)]
    for runs in (few, same):
        assert adopted(runs, here) == {}
        assert all("too few" in one.why for one in fit(runs, here).quantities)


def test_start_up_is_learnt_although_the_same_is_planned_of_every_model(here: MachineProfile) -> None:
    def slow_to_start(n: int) -> Run:
        run = trained(here, n, {})
        values = run.measurements[0].values | {"startup_s": 1.5 * planned(hardware_from_profile(here), n)["startup_s"]}
        return dataclasses.replace(run, measurements=(dataclasses.replace(run.measurements[0], values=values),))

    assert adopted([slow_to_start(n) for n in range(20)], here)["train_startup"] == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "another"}, "of another machine or device"),
        ({"inputs": {"device": "a GPU"}}, "of another machine or device"),
        ({"code_version": "0.0.1"}, "of another version of the code"),
        ({"frozen_at": "2025-12-31T00:00:00.000Z"}, "from before the calibration"),
        ({"measurements": ()}, "not finished"),
    ],
)
def test_runs_that_were_planned_from_other_constants_do_not_count(
    here: MachineProfile, changes: dict[str, Any], reason: str
) -> None:
    assert counting([trained(here, 1, {}, **changes)], here) == ([], {reason: 1})


# -- together with what was corrected before ------------------------------------------------------------------------------


def test_fitting_again_after_a_correction_finds_the_same_and_counts_nothing_twice(here: MachineProfile) -> None:
    truth = {"update": 2.0, "forward": 0.7}
    first = adopted([trained(here, n, truth) for n in range(20)], here)
    again = adopted([trained(here, n, truth, factors=first) for n in range(20)], here)
    assert again == pytest.approx(first)
    assert again["update"] == pytest.approx(2.0, rel=0.15)


def test_a_run_restated_is_what_the_plan_would_have_said(here: MachineProfile) -> None:
    factors = {"update": 1.7, "forward": 0.8, "train_startup": 1.4, "data": 3.0}
    run, corrected = trained(here, 3, {}), trained(here, 3, {}, factors=factors)
    exact = ("forward_s", "optimizer_s", "step_time_s", "train_tok_per_s", "mfu", "startup_s", "train_time_s")
    found = restated(run, factors)
    # Power goes with what each part keeps busy, so energy goes with time only nearly.
    assert found["energy_kwh"] == pytest.approx(corrected.prediction["energy_kwh"], rel=0.05)
    assert {name: found[name] for name in exact} == pytest.approx({name: corrected.prediction[name] for name in exact})
    assert restated(corrected, {}) == pytest.approx({name: run.prediction[name] for name in found}, rel=0.05)
    assert found["weights_bytes"] == run.prediction["weights_bytes"]


def test_intervals_hold_earlier_runs_against_the_corrected_prediction(here: MachineProfile) -> None:
    ledger, hardware = Ledger(), hardware_from_profile(here)
    run_id = freeze("train", "a run", {}, Planned(planned(hardware, 1), hardware), ledger)
    ledger.measure(run_id, {"optimizer_s": 2 * planned(hardware, 1)["optimizer_s"]})
    uncorrected = next(pair for pair in own_pairs(ledger) if pair.name == "optimizer_s")
    corrected = next(pair for pair in own_pairs(ledger, factors={"update": 2.0}) if pair.name == "optimizer_s")
    assert uncorrected.residual == pytest.approx(math.log(2))
    assert corrected.residual == pytest.approx(0.0)


def test_a_run_keeps_the_factors_that_it_was_planned_with(here: MachineProfile) -> None:
    taught = Corrections((Correction("update", 2.0, 9, 7, 3, 20.0, 10.0),), "2026-01-02T00:00:00Z", code_version())
    hardware = dataclasses.replace(hardware_from_profile(here), corrections=taught)
    run_id = freeze("train", "a run", {}, Planned(planned(hardware, 1), hardware))
    assert Ledger().get(run_id).inputs[CORRECTIONS] == {"update": 2.0}


# -- the command ----------------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([*args])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def fill(here: MachineProfile, n_runs: int, slow: float = 2.0) -> None:
    """A ledger with ``n_runs`` runs whose updates took ``slow`` times what was planned."""
    ledger, hardware = Ledger(), hardware_from_profile(here)
    for n in range(n_runs):
        values = planned(hardware, n)
        run_id = freeze("train", "a run", {"steps": 100}, Planned(values, hardware), ledger)
        took = {name: values[name] * (slow if name == "optimizer_s" else 1.0) for name in PASSES.values()}
        ledger.measure(run_id, {**took, "step_time_s": sum(took.values()), WAITED: 0.0})


def test_fit_stores_what_helps_says_so_in_plans_and_is_undone(here: MachineProfile, capsys: pytest.CaptureFixture[str]) -> None:
    fill(here, 20)
    code, out, _ = command(capsys, "ledger", "fit", "--json")
    assert code == 0
    document = json.loads(out)["fits"][0]
    assert [one["quantity"] for one in document["corrections"]["learned"]] == ["update"]
    update = next(one for one in document["quantities"] if one["quantity"] == "update")
    assert (update["n_runs"], update["n_held_out"], update["is_adopted"]) == (20, 6, True)
    assert update["after_percent"] < update["before_percent"]
    stored = load_profile()
    assert stored is not None
    assert stored.corrections.factors["update"] == pytest.approx(2.0, rel=0.1)
    _, text, _ = command(capsys, "ledger", "fit")
    assert "adopted" in text
    notes = plan_training(small_llama(), TrainingShape(steps=100), hardware_from_profile(stored)).notes
    assert any(stored.corrections.fitted_at in note for note in notes)
    code, text, _ = command(capsys, "ledger", "fit", "--undo")
    assert code == 0
    assert "removed the corrections of 20" in text
    undone = load_profile()
    assert undone is not None
    assert undone.corrections == Corrections()
    assert dataclasses.asdict(undone) == dataclasses.asdict(here)
    assert "no corrections" in command(capsys, "ledger", "fit", "--undo")[1]


def test_without_a_profile_it_asks_for_a_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "ledger", "fit")
    assert code == 2
    assert "twostroke calibrate" in err


def test_an_empty_ledger_and_one_with_too_few_runs_are_said(here: MachineProfile, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "ledger", "fit")
    assert code == 2
    assert "no runs to learn from" in err
    fill(here, 3)
    code, _, err = command(capsys, "ledger", "fit")
    assert code == 2
    assert "at most 3 configurations" in err
    found = load_profile()
    assert found is not None
    assert found.corrections == Corrections()


def test_a_damaged_ledger_is_said_and_left_alone(here: MachineProfile, capsys: pytest.CaptureFixture[str]) -> None:
    ledger_path().parent.mkdir(parents=True, exist_ok=True)
    ledger_path().write_bytes(b"not a ledger" * 100)
    code, _, err = command(capsys, "ledger", "fit")
    assert code != 0
    assert "is not a Twostroke ledger" in err
    assert ledger_path().read_bytes() == b"not a ledger" * 100
    with pytest.raises(CorruptFileError):
        fit_ledger(Ledger())


def test_too_few_runs_are_an_input_error_and_no_profile_a_config_error(here: MachineProfile) -> None:
    with pytest.raises(InputError):
        fit_ledger(Ledger())
    profile_path(here.fingerprint).unlink()
    with pytest.raises(ConfigError):
        fit_ledger(Ledger())


def test_a_run_without_numbers_teaches_nothing(here: MachineProfile) -> None:
    odd = trained(here, 1, {}, prediction={"optimizer_s": "soon", "forward_s": None}, inputs={CORRECTIONS: ["update"]})
    assert fit([odd], here).corrected.corrections == Corrections()
