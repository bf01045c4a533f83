"""Intervals hold the share of measurements they state, and are never narrower than what is known."""

from __future__ import annotations

import dataclasses
import math
import random
import tomllib
from pathlib import Path

import pytest

from machines import machine, native, small_llama
from scripts import script
from twostroke.core.errors import ConfigError
from twostroke.core.profile import read_fingerprint
from twostroke.core.rates import Conditions
from twostroke.ledger.scoring import compare
from twostroke.ledger.store import Ledger
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth import intervals
from twostroke.planner.truth.intervals import (
    LEAST_RUNS,
    LEVEL,
    MOST_LOW_BY,
    NARROWEST,
    Pair,
    Range,
    corrected,
    own_pairs,
    predict_with_intervals,
    range_of,
    with_intervals,
)

fitting = script("planner/engines/fit_intervals.py")
PRIOR = Range(-0.1, 0.3, "assumed", 0, "a test")


def test_every_number_of_both_plans_lies_inside_an_interval_of_its_own() -> None:
    spec, hardware = small_llama(), machine()
    train = plan_training(spec, TrainingShape(steps=100), hardware).prediction()
    serve = plan_serving(spec, ServingShape(prompt_tokens=64, output_tokens=64), hardware).prediction()
    for phase, prediction in (("train", train), ("serve", serve)):
        for basis in ("measured", "datasheet"):
            found = with_intervals(prediction, basis, phase)
            assert list(found) == list(prediction)
            for name, interval in found.items():
                assert interval["value"] == prediction[name]
                assert interval["level"] == LEVEL
                assert interval["low"] < interval["value"] < interval["high"], name
                # A name that falls to "other" would get a factor of e either way, and nobody would have noticed.
                assert intervals._quantity(name, phase)[0] != "other", name


def test_a_rate_has_the_inverse_interval_of_its_time() -> None:
    found = with_intervals({"step_time_s": 2.0, "train_tok_per_s": 500.0}, "measured", "train")
    work = 2.0 * 500.0  # tokens of a step
    assert found["train_tok_per_s"]["low"] == pytest.approx(work / found["step_time_s"]["high"])
    assert found["train_tok_per_s"]["high"] == pytest.approx(work / found["step_time_s"]["low"])


def test_a_busy_calibration_widens_times_to_the_short_side_and_bytes_not_at_all() -> None:
    prediction = {"step_time_s": 2.0, "train_tok_per_s": 500.0, "weights_bytes": 1e9, "peak_memory_bytes": 2e9}
    quiet, busy = (with_intervals(prediction, "measured", "train", low_by=share) for share in (0.0, 0.4))
    assert busy["step_time_s"]["low"] == pytest.approx(0.6 * quiet["step_time_s"]["low"])
    assert busy["step_time_s"]["high"] == quiet["step_time_s"]["high"]
    assert busy["train_tok_per_s"]["high"] == pytest.approx(quiet["train_tok_per_s"]["high"] / 0.6)
    for name in ("weights_bytes", "peak_memory_bytes"):
        assert busy[name] == quiet[name]
    beyond = with_intervals(prediction, "measured", "train", low_by=1.0)["step_time_s"]
    assert beyond["low"] == pytest.approx((1 - MOST_LOW_BY) * quiet["step_time_s"]["low"])


def test_the_profile_says_how_busy_the_machine_was_when_it_was_calibrated() -> None:
    quiet = machine()
    busy = dataclasses.replace(quiet, conditions=Conditions(low_by_share={"train": 0.4}))
    prediction = {"step_time_s": 2.0, "ttft_s": 2.0}
    of_quiet, of_busy = (predict_with_intervals(prediction, hardware, "train") for hardware in (quiet, busy))
    assert of_busy["step_time_s"]["low"] == pytest.approx(0.6 * of_quiet["step_time_s"]["low"])
    assert predict_with_intervals(prediction, busy, "serve") == predict_with_intervals(prediction, quiet, "serve")


def test_a_short_run_is_as_uncertain_as_its_start_up_and_a_long_one_as_its_step() -> None:
    def whole(steps: int) -> dict[str, dict[str, float]]:
        values = {"step_time_s": 0.01, "startup_s": 30.0, "train_time_s": 30.0 + 0.01 * steps, "cost_usd": 5.0}
        return with_intervals(values, "measured", "train")

    for steps, like in ((1, "startup_s"), (10**8, "step_time_s")):
        found = whole(steps)
        for name in ("train_time_s", "cost_usd"):
            for end in ("low", "high"):
                ratio = found[name][end] / found[name]["value"]
                assert ratio == pytest.approx(found[like][end] / found[like]["value"], rel=0.01), (steps, name, end)
    assert with_intervals({"train_time_s": 5.0}, "measured", "train")["train_time_s"]["high"] > 5.0


def test_known_errors_lie_inside_the_assumed_intervals() -> None:
    # (predicted − measured)/measured of the first measured server, in percent, written down before there were intervals. Other
    # kinds have been measured since.
    known = {"ttft_s": -78, "weights_bytes": 0.1}
    for name, error in known.items():
        phase = "train" if name == "weights_bytes" else "serve"
        found = with_intervals({name: 100.0 + error}, "measured", phase)[name]
        assert found["low"] <= 100.0 <= found["high"], name


def test_counts_are_exact_and_what_is_no_number_has_none() -> None:
    found = with_intervals({"n_layers": 12, "steps": 7, "word": "x", "nothing": None, "free_usd": 0.0}, "measured", "train")
    assert (found["n_layers"]["low"], found["n_layers"]["high"]) == (12, 12)
    assert (found["steps"]["low"], found["steps"]["high"]) == (7, 7)
    assert found["word"] == {"value": None} == found["nothing"]
    assert (found["free_usd"]["low"], found["free_usd"]["high"]) == (0.0, 0.0)


def test_few_runs_leave_the_range_alone() -> None:
    assert corrected(PRIOR, [1.0] * (LEAST_RUNS - 1)) is PRIOR


def test_a_correction_is_the_order_statistic_of_the_scores() -> None:
    # n = 9: rank ⌈10·0.9⌉ = 9, the largest score. Scores of r: max(−0.1 − r, r − 0.3).
    residuals = [0.0, 0.05, 0.1, 0.1, 0.1, 0.15, 0.2, 0.25, 0.5]
    widened = corrected(PRIOR, residuals)
    assert (widened.low, widened.high) == (pytest.approx(-0.1 - 0.2), pytest.approx(0.3 + 0.2))  # 0.5 is 0.2 outside
    narrowed = corrected(PRIOR, [0.1] * 8 + [0.2])
    assert (narrowed.low, narrowed.high) == (pytest.approx(0.0), pytest.approx(0.2))  # 0.2 is 0.1 inside
    assert (narrowed.kind, narrowed.n) == ("measured", 9)


def test_a_correction_never_turns_a_range_inside_out() -> None:
    found = corrected(PRIOR, [0.1] * 50)
    assert found.low < 0.1 < found.high
    assert found.high - found.low == pytest.approx(2 * intervals.NARROWEST)


@pytest.mark.parametrize(("bias", "spread"), [(0.0, 0.02), (0.5, 0.1), (-0.4, 0.3)])
def test_corrected_ranges_hold_the_next_run_as_often_as_they_say(bias: float, spread: float) -> None:
    rng = random.Random(1)
    hits, trials = 0, 3000
    for _ in range(trials):
        *seen, following = (rng.gauss(bias, spread) for _ in range(21))
        found = corrected(PRIOR, seen)
        hits += found.low <= following <= found.high
    # Conformal: at least LEVEL, at most LEVEL + 1/(n + 1), on average; four standard errors of the 3,000 trials around.
    slack = 4 * math.sqrt(0.09 / trials)
    assert LEVEL - slack <= hits / trials <= LEVEL + 1 / 21 + slack


def test_fitted_ranges_hold_the_next_run_as_often_as_they_say() -> None:
    rng = random.Random(2)
    hits, trials = 0, 3000
    for _ in range(trials):
        *seen, following = (rng.expovariate(1.0) for _ in range(25))  # skewed, as waiting is
        found = fitting.fitted_range(seen, "a test")
        hits += found.low <= following <= found.high
    assert hits / trials == pytest.approx(23 / 25, abs=4 * math.sqrt(0.08 / trials))  # (n − 1)/(n + 1) of [least, most]


def test_a_fitted_range_of_few_runs_is_about_their_median() -> None:
    found = fitting.fitted_range([0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3], "a test")
    assert (found.low, found.high) == (pytest.approx(-0.1), pytest.approx(0.3))
    with pytest.raises(ConfigError, match="too few"):
        fitting.fitted_range([0.1] * 8, "a test")


def test_what_was_fitted_is_read_back_and_the_rest_keeps_its_range(tmp_path: Path) -> None:
    rows = [Pair("step_time_s", 1.0, math.exp(0.01 * i), run=f"r{i}") for i in range(24)]
    rows += [Pair("train_tok_per_s", math.exp(0.01 * i), 1.0, run=f"r{i}") for i in range(24)]  # the same, said twice
    rows += [Pair("ttft_s", 1.0, 2.0, phase="serve", run=f"r{i}") for i in range(3)]  # too few
    file = tmp_path / "intervals.toml"
    file.write_text(fitting.fit_intervals(rows, "a test"))
    ranges, before = intervals.read_ranges(file), intervals.read_ranges()
    assert set(ranges) == set(before)
    step = ranges["step", "measured", "train"]
    assert (step.low, step.high, step.n, step.kind) == (-NARROWEST, pytest.approx(0.23), 24, "measured")
    unchanged = ("ttft", "measured", "serve")
    assert ranges[unchanged] == before[unchanged]
    assert tomllib.loads(file.read_text())["level"] == LEVEL


def test_this_machines_runs_move_the_interval_and_anothers_do_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for i in range(12):
        run = ledger.freeze("train", "x", {}, with_intervals({"step_time_s": 1.0}, "measured", "train"))
        ledger.measure(run, {"step_time_s": 1.5 + 0.001 * i})
    pairs = own_pairs(ledger)
    assert len(pairs) == 12
    assert all(row.inside is False for run in ledger.runs() for row in compare(run))
    fresh = predict_with_intervals({"step_time_s": 1.0}, machine(), "train", ledger)["step_time_s"]
    assert fresh["low"] <= 1.5 <= fresh["high"]
    assert fresh["width"] == "measured"
    assert own_pairs(ledger, fingerprint="another") == []
    assert read_fingerprint().key == ledger.get("last").fingerprint


def test_a_ledger_that_cannot_be_read_stops_no_prediction(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no database at all, but long enough to look at")
    found = predict_with_intervals({"step_time_s": 1.0}, machine(), "train", Ledger(path))
    assert found["step_time_s"] == with_intervals({"step_time_s": 1.0}, "measured", "train")["step_time_s"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("level = 0.5", "level = 0.5"),
        ('level = 0.9\n[[interval]]\nquantity = "step"', "not readable"),
        (
            'level = 0.9\n[[interval]]\nquantity="a"\nbasis="b"\nphase="c"\nlow=1\nhigh=0\nkind="assumed"\nn=0\nsource=""',
            "must not exceed",
        ),
    ],
)
def test_a_file_of_ranges_that_is_wrong_is_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "intervals.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        intervals.read_ranges(file)


def test_ranges_are_looked_up_by_phase_then_any_then_other() -> None:
    assert range_of("peak_memory", "measured", "train") != range_of("peak_memory", "measured", "serve")
    assert range_of("state", "datasheet", "serve") == range_of("state", "datasheet", "train")
    assert range_of("never heard of", "datasheet", "serve") == range_of("other", "datasheet", "any")


def test_serving_by_torch_is_predicted_with_an_interval_of_its_own() -> None:
    """Its times are those of rates alone, and wide; its memory is as certain as the native engine's."""
    values, torch_only = {"tpot_s": 0.01, "ttft_s": 1.0, "weights_bytes": 1e9}, machine()
    assert torch_only.serves_by_torch
    assert not native().serves_by_torch
    wide, narrow = (predict_with_intervals(values, hardware, "serve") for hardware in (torch_only, native()))
    assert {one["basis"] for one in wide.values()} == {"rates"}
    for name in ("tpot_s", "ttft_s"):
        assert wide[name]["high"] / wide[name]["low"] > 1.1 * narrow[name]["high"] / narrow[name]["low"]
    assert wide["weights_bytes"]["high"] == narrow["weights_bytes"]["high"]
    assert predict_with_intervals({"step_time_s": 1.0}, torch_only, "train")["step_time_s"]["basis"] == "measured"


@pytest.mark.parametrize("basis", ["datasheet", "measured"])
def test_energy_is_less_certain_than_its_time(basis: str) -> None:
    served = with_intervals({"output_tok_per_s": 100.0, "energy_per_mtok_kwh": 1.0}, basis, "serve")
    energy, rate = served["energy_per_mtok_kwh"], served["output_tok_per_s"]
    assert energy["low"] < 100 / rate["high"] < 1 < 100 / rate["low"] < energy["high"]
    parts = {"train_time_s": 110.0, "startup_s": 10.0, "step_time_s": 1.0, "energy_kwh": 110.0, "cost_usd": 110.0}
    trained = with_intervals(parts, basis, "train")
    assert trained["cost_usd"]["low"] == pytest.approx(trained["train_time_s"]["low"])
    assert trained["energy_kwh"]["low"] < trained["train_time_s"]["low"]
    assert trained["energy_kwh"]["high"] > trained["train_time_s"]["high"]
