"""The shares of a residual add up to it, and name the part that missed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.ledger.attribution import IDENTITIES, attribute, pool
from twostroke.ledger.store import Measurement, Run


def run_of(prediction: dict[str, Any], measurement: dict[str, Any], **inputs: Any) -> Run:
    rows = (Measurement("2026-01-01T00:00:00Z", "finished", measurement, None),)
    return Run("train-1", "train", "demo", "2026-01-01T00:00:00Z", "0.1.0", "abc", inputs, prediction, rows)


def test_a_step_that_looks_right_shows_two_parts_that_are_not() -> None:
    prediction = {"step_time_s": 1.0, "forward_s": 0.2, "backward_s": 0.6, "optimizer_s": 0.1, "data_s": 0.1}
    measured = {"step_time_s": 1.0, "forward_s": 0.4, "backward_s": 0.4, "optimizer_s": 0.1, "data_s": 0.1}
    (step,) = attribute(run_of(prediction, measured))
    percents = {s.part: s.percent for s in step.shares}
    assert step.error_percent == 0
    assert percents["forward_s"] == pytest.approx(-20)
    assert percents["backward_s"] == pytest.approx(20)
    assert percents["between the passes"] == pytest.approx(0)


def test_memory_that_was_not_measured_apart_goes_to_the_rest_by_name() -> None:
    prediction = {"peak_memory_bytes": 1000, "weights_bytes": {"value": 300, "low": 290}, "activations_bytes": 400}
    (peak,) = attribute(run_of(prediction, {"peak_memory_bytes": 800, "weights_bytes": 300}))
    assert [s.part for s in peak.shares] == ["weights_bytes", "process, loss, allocator; activations_bytes not measured apart"]
    assert [s.residual for s in peak.shares] == [0, 200]
    assert peak.worst.part.startswith("process")


def test_a_runs_time_counts_each_step_and_an_answers_each_token() -> None:
    trained = run_of(
        {"train_time_s": 120.0, "step_time_s": 1.0, "startup_s": 20.0},
        {"train_time_s": 150.0, "step_time_s": 1.1, "startup_s": 35.0},
        steps=100,
    )
    (whole,) = attribute(trained)
    assert [(s.part, pytest.approx(s.residual)) for s in whole.shares] == [
        ("step_time_s", -10.0),
        ("startup_s", -15.0),
        ("checkpoints, start-up outside the clock", -5.0),
    ]
    prediction = {"ttft_s": 0.1, "tpot_s": 0.01, "e2e_s": 0.29}
    measured = {"ttft_s": 0.2, "tpot_s": 0.02, "e2e_s": 0.6}
    (answer,) = attribute(run_of(prediction, measured, output_tokens=[10, 30]))  # 20 on average, 19 after the first
    assert [s.residual for s in answer.shares] == [pytest.approx(-0.1), pytest.approx(-0.19), pytest.approx(-0.02)]
    (without_length,) = attribute(run_of(prediction, measured))
    assert without_length.shares[-1].part.endswith("tpot_s not measured apart")


def test_nothing_is_attributed_without_a_total_or_a_part() -> None:
    assert attribute(run_of({"step_time_s": 1.0}, {"step_time_s": 2.0})) == []
    assert attribute(run_of({"forward_s": 1.0}, {"forward_s": 2.0})) == []
    assert attribute(run_of({"step_time_s": 1.0, "forward_s": 1.0}, {"step_time_s": 0.0, "forward_s": 1.0})) == []


NAMES = sorted({name for identity in IDENTITIES for name in (identity.total, *(part for part, _ in identity.parts))})
VALUES = st.dictionaries(st.sampled_from(NAMES), st.one_of(st.none(), st.floats(1e-3, 1e6)))


@given(VALUES, VALUES, st.one_of(st.none(), st.integers(1, 1000)))
@settings(suppress_health_check=[HealthCheck.too_slow])  # of drawing, where other tests take the processor
def test_shares_sum_to_the_residual_whatever_was_measured(
    prediction: dict[str, Any], measured: dict[str, Any], steps: int | None
) -> None:
    for one in attribute(run_of(prediction, measured, steps=steps, output_tokens=8)):
        scale = sum(abs(s.predicted) + abs(s.measured) for s in one.shares)
        assert sum(s.residual for s in one.shares) == pytest.approx(one.residual, abs=1e-9 * scale)  # sums of floats
        assert sum(s.percent for s in one.shares) == pytest.approx(one.error_percent, abs=1e-7 * scale / one.measured)


def test_pooling_says_which_part_misses_most() -> None:
    prediction = {"step_time_s": 1.0, "forward_s": 0.5, "backward_s": 0.5}
    runs = [
        run_of(prediction, {"step_time_s": 1.0 + slow, "forward_s": 0.5, "backward_s": 0.5 + slow}) for slow in (0.25, 0.6, 1.0)
    ]
    worst, *others = pool([*runs, run_of({}, {})])
    assert (worst.total, worst.part, worst.n_runs, worst.worst_in) == ("step_time_s", "backward_s", 3, 3)
    assert worst.median_percent == pytest.approx(-100 * 0.6 / 1.6)
    assert worst.median_abs_percent == pytest.approx(100 * 0.6 / 1.6)
    assert {s.part for s in others} == {"forward_s", "between the passes"}
    assert all(s.worst_in == 0 for s in others)
