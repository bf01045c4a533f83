"""The arms of an A/B test: shares of the machine's time, intervals that hold as often as they say, what is told from noise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.errors import InputError
from twostroke.evaluation import arms
from twostroke.evaluation.arms import Estimate, Row, compare_arms, holm, machine_seconds, read_lines, share_difference, wilson


def answer(i: int, arm: str | None, unit: str, at_s: float = 0.0, ttft_s: float = 0.1, e2e_s: float = 1.0, **more: Any) -> Any:
    own = {} if arm is None else {"arm": arm, "unit": unit, "share": 0.5}
    return {
        "time": at_s + e2e_s, "id": f"cmpl-{i}", "key": None, "model": "a", "outcome": "complete", "prompt_tokens": 5,
        "cached_tokens": 0, "completion_tokens": 11, "finish_reasons": {"stop": 1}, "ttft_s": ttft_s, "e2e_s": e2e_s,
    } | own | more  # fmt: skip


def traffic(seed: int, slower: float, n_clients: int = 60, each: int = 8, spread: float = 0.5) -> list[dict[str, Any]]:
    """Requests of clients who differ among themselves; those of arm b take ``slower`` times as long."""
    chance, found = random.Random(seed), []
    for client in range(n_clients):
        arm = "ab"[client % 2]
        own = chance.lognormvariate(0.0, spread) * (slower if arm == "b" else 1.0)
        for _ in range(each):
            took = own * chance.lognormvariate(0.0, 0.2)
            at = chance.random() * 1000
            found.append(answer(len(found), arm, f"u{client}", at, 0.1 * took, took))
    return found


def row_of(rows: list[Row], name: str) -> Row:
    return next(row for row in rows if row.name == name)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 20)), min_size=1, max_size=30))
def test_all_requests_together_get_the_time_in_which_one_was_in_flight(lives: list[tuple[float, float]]) -> None:
    began, took = (np.array(column) for column in zip(*lives, strict=True))
    found = machine_seconds(began + took, took)
    busy, until = 0.0, -1.0
    for low, length in sorted(lives):
        busy += max(0.0, low + length - max(low, until))
        until = max(until, low + length)
    assert found.sum() == pytest.approx(busy, rel=1e-6, abs=1e-6)
    assert (found > 0).all()
    assert (found <= took + 1e-6).all()


def test_requests_in_flight_share_a_moment_equally() -> None:
    found = machine_seconds(np.array([4.0, 4.0, 6.0]), np.array([4.0, 2.0, 1.0]))
    assert found == pytest.approx([3.0, 1.0, 1.0])


def test_wilsons_interval_is_that_of_the_textbook() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=1e-4)


def test_newcombes_interval_is_that_of_the_paper() -> None:
    found, _ = share_difference(48, 80, 56, 70)  # Newcombe 1998, table II (a): 56/70 − 48/80
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_a_difference_that_is_there_is_told_and_one_that_is_not_is_not(seed: int) -> None:
    for slower, told in ((3.0, True), (1.0, False)):
        comparison = compare_arms(traffic(seed, slower), 1.0)
        row = row_of(comparison.rows, "E2E median")
        assert row.told is told
        assert row.better == ("a" if told else None)
        assert comparison.a.name == "a"
        cost = row_of(comparison.rows, "cost of a million output tokens")
        assert cost.a is not None
        assert cost.a.value > 0


def test_intervals_of_alike_arms_hold_no_difference_in_95_of_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "DRAWS", 400)
    n, held = 100, 0
    for seed in range(n):
        found = row_of(compare_arms(traffic(seed, 1.0, each=5), 1.0).rows, "TTFT median").difference
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0 <= found.high
    # 95 are expected, and 87 or fewer in one test of a thousand. Measured: 95; with each request as a client of its own, 66.
    assert held >= 87


def test_few_clients_get_no_interval_however_many_requests() -> None:
    comparison = compare_arms(traffic(1, 3.0, n_clients=6, each=200), 1.0)
    row = row_of(comparison.rows, "E2E median")
    assert row.a is not None
    assert row.a.low is None
    assert not row.told
    assert "Fewer than 10" in comparison.notes[0]


def test_the_last_rating_of_an_answer_counts() -> None:
    lines = traffic(2, 1.0)
    for line in lines[:200]:
        rating = {"time": 0.0, "id": line["id"], "key": None, "choice": 0, "arm": line["arm"], "unit": line["unit"]}
        lines.append(rating | {"rating": -1.0})
        lines.append(rating | {"rating": 1.0 if line["arm"] == "b" else -0.2})
    row = row_of(compare_arms(lines, 1.0).rows, "good ratings")
    assert row.a is not None
    assert row.b is not None
    assert (row.a.value, row.b.value, row.better) == (0.0, 1.0, "b")


def test_an_arm_that_loses_clients_is_noticed() -> None:
    lines = [line for line in traffic(3, 1.0, n_clients=200) if line["arm"] == "a" or int(line["unit"][1:]) % 4 == 1]
    comparison = compare_arms(lines, 1.0)
    assert any("was to have 50%" in note for note in comparison.notes)
    assert not compare_arms(traffic(3, 1.0), 1.0).notes


def test_comparisons_are_corrected_for_their_number() -> None:
    def row(p_value: float | None) -> Row:
        return Row("x", "s", None, None, Estimate(1.0), p_value)

    assert [each.told for each in holm([row(0.04), row(0.01), row(None), row(0.03)])] == [False, True, False, False]
    assert [each.told for each in holm([row(0.04)])] == [True]


def test_a_log_without_two_arms_is_refused_by_name(tmp_path: Path) -> None:
    for lines, why in (
        ([answer(1, None, "")], "the log has none. `serve --ab"),
        ([answer(1, "a", "u")], "the log has 1: a"),
        ([answer(i, arm, "u") for i, arm in enumerate("abc")], "the log has 3"),
    ):
        with pytest.raises(InputError, match=why):
            compare_arms(lines, 1.0)
    with pytest.raises(InputError, match="'z' is not in the log"):
        compare_arms([answer(1, "a", "u")], 1.0, ("a", "z"))
    assert compare_arms([answer(i, arm, "u") for i, arm in enumerate("abc")], 1.0, ("c", "a")).a.name == "c"
    log = tmp_path / "usage.jsonl"
    log.write_text(json.dumps(answer(1, "a", "u")) + '\n{"torn": ')
    assert len(read_lines(log)) == 1
    log.write_text("these\nare\nno lines\n")
    with pytest.raises(InputError, match="is not a usage log"):
        read_lines(log)
