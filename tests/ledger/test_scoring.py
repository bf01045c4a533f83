"""Scores are the relative errors they say they are, and nothing is scored that was not both predicted and measured."""

from __future__ import annotations

import math

import pytest

from twostroke.ledger.scoring import compare, error_percent, quantile, summarise
from twostroke.ledger.store import Measurement, Run
from twostroke.ledger.text import align, comparison_text, format_value, runs_text, scores_text


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
