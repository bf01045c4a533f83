"""Scores are the relative errors they say they are, and nothing is scored that was not both predicted and measured."""

from __future__ import annotations

import math

import pytest

from twostroke.ledger.attribution import attribute, pool
from twostroke.ledger.scoring import compare, error_percent, quantile, summarise
from twostroke.ledger.store import Measurement, Run
from twostroke.ledger.text import (
    WIDTH,
    align,
    comparison_text,
    format_interval,
    format_value,
    run_text,
    runs_text,
    scores_text,
)


def run_of(prediction: dict[str, object], measurement: dict[str, object]) -> Run:
    rows = (Measurement("2026-01-01T00:00:00Z", "finished", measurement, None),) if measurement else ()
    return Run("train-1", "train", "demo", "2026-01-01T00:00:00Z", "0.1.0", "abc", {}, prediction, rows)


def test_error_is_relative_to_the_measurement() -> None:
    assert error_percent(1.1, 1.0) == pytest.approx(10.0)
    assert error_percent(0.5, 1.0) == pytest.approx(-50.0)
    assert error_percent(1.0, 0.0) is None
    assert error_percent(None, 1.0) is None


def test_compare_keeps_the_predictions_order_and_adds_what_was_only_measured() -> None:
    rows = compare(run_of({"b_s": 2.0, "a_s": {"value": 1.0, "low": 0.5}, "word": "x"}, {"a_s": 2.0, "c_s": 3.0, "flag": True}))
    assert [(r.name, r.predicted, r.measured) for r in rows] == [("b_s", 2.0, None), ("a_s", 1.0, 2.0), ("c_s", None, 3.0)]
    assert rows[1].error_percent == pytest.approx(-50.0)


def test_null_is_not_scored() -> None:
    rows = compare(run_of({"a_s": None, "b_s": 1.0}, {"a_s": 1.0, "b_s": None}))
    assert [r.error_percent for r in rows] == [None, None]


def test_summary_is_over_absolute_errors_with_the_signed_median_beside() -> None:
    runs = [run_of({"a_s": p}, {"a_s": 1.0}) for p in (0.9, 1.1, 1.3, 0.5)]
    (score,) = summarise([*runs, run_of({"a_s": 1.0}, {})])
    assert score.n_runs == 4
    assert score.median_abs_error_percent == pytest.approx(20.0)  # of 10, 10, 30, 50
    assert score.worst_abs_error_percent == pytest.approx(50.0)
    assert score.median_error_percent == pytest.approx(0.0)  # of −50, −10, 10, 30


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_quantile_interpolates(q: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)
    assert math.isnan(quantile([], q))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("requests_per_s", 54.27, "54.27/s"),
        ("step_time_s", 0.5, "500 ms"),
        ("peak_memory_bytes", 2**30, "1 GiB"),
        ("train_tok_per_s", 8300.0, "8.3k tok/s"),
        ("read_bytes_per_s", 2**30, "1 GiB/s"),
        ("cost_usd", 0.5, "$0.50"),
        ("energy_kwh", 0.25, "0.25 kWh"),
        ("mfu", 0.123, "12.3%"),
        ("concurrency", 4.0, "4"),
        ("loss", 1.23456, "1.235"),
        ("loss", None, "–"),
    ],
)
def test_values_are_shown_in_the_unit_of_their_name(name: str, value: float | None, text: str) -> None:
    assert format_value(name, value) == text


def test_texts_line_up_and_say_when_there_is_nothing() -> None:
    assert align([["a", "1"], ["bbb", "22"]], right=(1,)) == "a     1\nbbb  22"
    assert "no runs yet" in runs_text([])
    assert "No run" in scores_text([])
    run = run_of({"step_time_s": 1.0}, {"step_time_s": 2.0})
    assert "-50.0%" in comparison_text(run, compare(run))
    assert "Nothing" in comparison_text(run, [])
    assert "train-1" in runs_text([run])
    assert "step_time_s" in scores_text(summarise([run]))


@pytest.mark.parametrize(
    ("name", "interval", "text"),
    [
        ("step_time_s", (0.0652, 0.059, 0.0925), "65.2 ms [59–92.5]"),
        ("tpot_s", (0.00137, 0.000875, 0.00176), "1.37 ms [0.875–1.76]"),
        ("data_s", (0.0001, 0.00005, 0.0034), "100 µs [50–3,400]"),
        ("train_time_s", (93.0, 60.0, 180.0), "1 min 33 s [1 min 0 s–3 min 0 s]"),
        ("peak_memory_bytes", (2**30, 2**29, 3 * 2**30), "1 GiB [0.5–3]"),
        ("train_tok_per_s", (31400.0, 22100.0, 34700.0), "31.4k tok/s [22.1–34.7]"),
        ("energy_kwh", (8e-5, 6e-5, 1.2e-4), "80 mWh [60–120]"),
        ("data_s", (0.0, 0.0, 0.0), "0 s [0 s–0 s]"),
        ("step_time_s", (1.0, None, None), "1 s"),
        ("step_time_s", (None, None, None), "–"),
    ],
)
def test_an_interval_is_shown_in_the_unit_of_its_value(
    name: str, interval: tuple[float | None, float | None, float | None], text: str
) -> None:
    assert format_interval(name, *interval) == text


def framed(value: float) -> dict[str, float]:
    return {"value": value, "low": 0.8 * value, "high": 1.2 * value, "level": 0.9}


def test_a_measurement_is_inside_or_outside_its_interval() -> None:
    run = run_of({"a_s": framed(1.0), "b_s": framed(1.0), "c_s": 1.0}, {"a_s": 1.2, "b_s": 1.3, "c_s": 1.0})
    assert [r.inside for r in compare(run)] == [True, False, None]
    scores = {s.name: (s.n_inside, s.n_intervals) for s in summarise([run, run])}
    assert scores == {"a_s": (2, 2), "b_s": (0, 2), "c_s": (0, 0)}
    text = comparison_text(run, compare(run))
    assert text.count("OUTSIDE") == 1
    assert "90%" in text
    assert "2 of 4 measurements (50%)" in scores_text(summarise([run, run]))


def test_an_interrupted_run_is_no_measure_of_the_whole_runs_time() -> None:
    prediction = {"train_time_s": framed(100.0), "step_time_s": framed(1.0), "startup_s": 5.0}
    measured = {"train_time_s": 10.0, "step_time_s": 1.1, "startup_s": 5.0}
    for status, error in (("finished", 900.0), ("interrupted", None), ("failed", None)):
        rows = (Measurement("2026-01-01T00:00:00Z", status, measured, None),)
        run = Run("train-1", "train", "demo", "2026-01-01T00:00:00Z", "0.1.0", "abc", {"steps": 95}, prediction, rows)
        whole, step, _ = compare(run)
        assert (whole.predicted, whole.measured, whole.error_percent) == (100.0, 10.0, error and pytest.approx(error))
        assert step.error_percent == pytest.approx(-100 / 11)  # a step is a step
        assert {one.total for one in attribute(run)} == ({"train_time_s"} if error else set())


def test_no_line_is_wider_than_a_terminal() -> None:
    inputs = {"recipe": {"train": {f"setting_{i}": "x" * i for i in range(80)}}, "run_directory": "/a/long/path" * 20}
    prediction = {name: framed(1.23456e-3) for name in ("step_time_s", "forward_s", "backward_s", "train_time_s")}
    measured = dict.fromkeys(prediction, 0.00987654)
    run = Run("generate-20260101-000000-0123abcd", "train", "/a/very/long/subject" * 9, "2026-01-01T00:00:00.000Z",
              "0.1.0+g0123456789ab", "0123456789ab", inputs, prediction,
              (Measurement("2026-01-01T00:00:00Z", "interrupted", measured, "a note of many words " * 30),))  # fmt: skip
    rows, attributions = compare(run), attribute(run)
    for text in (runs_text([run]), run_text(run, rows, attributions), scores_text(summarise([run]), pool([run]))):
        assert max(map(len, text.split("\n"))) <= WIDTH, text
    assert "forward_s" in run_text(run, rows, attributions)
    narrow = runs_text([run], 80).split("\n")
    assert max(map(len, narrow)) <= 80
    assert [line.split()[0] for line in narrow] == ["run", "predicted", run.run_id, "step_time_s"]
    assert narrow[2].endswith("/a/very/long/subject")
    _, inputs_and_notes = run_text(run, rows, attributions, 80).split("inputs\n")
    assert all(len(line) <= 80 or " " not in line.strip() for line in inputs_and_notes.split("\n"))  # a long word stays whole
