"""benchmarks/planner/session: what it counts as a headline, and that its shares are of what was predicted."""

from __future__ import annotations

import pytest

from scripts import script
from twostroke.ledger.store import KINDS, Measurement, Run

headlines = script("planner/session/headlines.py")


def run_of(kind: str, prediction: dict, measured: dict) -> Run:
    values = (Measurement("2026-01-01T00:00:00Z", "finished", measured, None),)
    return Run("id", kind, "quick", "2026-01-01T00:00:00Z", "code", "machine", {}, prediction, values)


def interval(value: float, low: float, high: float) -> dict:
    return {"value": value, "low": low, "high": high, "level": 0.9}


def test_every_kind_with_headlines_is_a_kind_of_the_ledger() -> None:
    assert set(headlines.HEADLINES) <= set(KINDS)


def test_a_number_counts_only_if_it_was_predicted_and_measured() -> None:
    run = run_of("bench", {"tpot_s": interval(1.0, 0.5, 2.0), "ttft_s": interval(1.0, 0.5, 2.0)}, {"tpot_s": 4.0, "e2e_s": 9.0})
    (found,) = headlines.found_in("twostroke bench serve m", run)
    assert (found.name, found.is_headline, found.inside) == ("tpot_s", True, False)
    assert found.error_percent == pytest.approx(-75.0)


def test_the_summary_takes_headlines_apart_from_other_numbers() -> None:
    run = run_of(
        "train",
        {"step_time_s": interval(1.1, 0.9, 1.2), "optimizer_s": interval(5.0, 4.0, 6.0)},
        {"step_time_s": 1.0, "optimizer_s": 1.0},
    )
    text = headlines.summary([headlines.found_in("twostroke train r.toml", run)], "never")
    assert "Median headline error: 10.0% of 1 (aim 12%: met)." in text
    assert "Inside their intervals: 100% (aim 85%: met)." in text
    assert "inside 50%" in text
    assert "OUTSIDE" in text.split("## Other numbers")[1]


def test_two_rounds_say_what_they_differ_by() -> None:
    rounds = [
        headlines.found_in(
            "twostroke generate m", run_of("generate", {"tpot_s": interval(1.0, 0.5, 2.0)}, {"tpot_s": measured})
        )
        for measured in (1.0, 1.5)
    ]
    assert "differ by 50.0% (median), 50.0% at most" in headlines.summary(rounds, "never")


def test_a_session_without_predictions_says_so() -> None:
    assert "No headline" in headlines.summary([[]], "never")
