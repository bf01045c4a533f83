"""What was served is told apart by how many requests were in flight, and scored beside what was expected of so many."""

from __future__ import annotations

import pytest

from twostroke.planner.choosing.server_settings import Level
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import Slo
from twostroke.server.record import LEAST_ANSWERS, by_users, served_levels, transferred, within_slo
from twostroke.server.served import Answer, in_flight

LEVELS = [Level(n, 0.1 * n, 0.01 * n, 1.0) for n in (1, 2, 4)]
SHAPE = ServingShape(prompt_tokens=100, output_tokens=11)


def answer(begin_s: float, took_s: float = 1.0, prompt: int = 100, output: int = 11, first_s: float = 0.5) -> Answer:
    return Answer(prompt, output, first_s, took_s, begin_s + took_s)


def test_answers_in_flight_are_counted_over_each_answers_time() -> None:
    assert in_flight([answer(0), answer(5)]) == [1.0, 1.0]
    assert in_flight([answer(0), answer(0)]) == [2.0, 2.0]
    assert in_flight([answer(0, 4.0), answer(1, 1.0), answer(10, 0.0)]) == pytest.approx([1.25, 2.0, 1.0])
    assert in_flight([]) == []


def test_means_are_taken_of_answers_with_as_many_beside_them_and_as_long() -> None:
    alone = [answer(10.0 * i, first_s=0.2) for i in range(LEAST_ANSWERS)]
    four = [answer(1000.0 + 10 * (i // 4), first_s=0.6) for i in range(4 * LEAST_ANSWERS)]
    short = [answer(5000.0 + 10 * i, output=2, first_s=0.9) for i in range(LEAST_ANSWERS)]
    few = [answer(9000.0 + 10 * (i // 2), first_s=0.9) for i in range(LEAST_ANSWERS - 2)]
    many = [answer(20000.0, first_s=0.9) for _ in range(50)]
    found = served_levels([*alone, *four, *short, *few, *many], LEVELS, SHAPE)
    assert [level.users for level in found] == [1, 4]
    assert by_users(found) == pytest.approx({"ttft_of_1_s": 0.2, "tpot_of_1_s": 0.08, "ttft_of_4_s": 0.6, "tpot_of_4_s": 0.04})
    assert set(by_users(found)) <= set(by_users(LEVELS))
    assert served_levels([], LEVELS, SHAPE) == served_levels(alone, [], SHAPE) == []


def test_the_share_of_answers_within_the_slo() -> None:
    answers = [answer(0.0, first_s=first) for first in (0.1, 0.2, 0.9, 0.9)]
    found = within_slo(answers, Slo(0.5, None))
    assert found["served_within_slo"] == 0.5
    assert found["served_mean_ttft_s"] == pytest.approx(0.525)
    assert within_slo([], Slo()) == {}


def test_handovers_are_means_and_test_a_prediction_of_like_prompts_alone() -> None:
    counted = {"handover_requests": 3.0, "handover_bytes": 900.0, "handover_s": 0.03, "handover_tokens": 432.0}
    means = {"transfer_bytes": 300.0, "transfer_s": 0.01}
    assert transferred(ServingShape(prompt_tokens=128), counted) == (means, "")
    values, why_not = transferred(ServingShape(prompt_tokens=1000), counted)
    assert (values, why_not) == (means, "predicted for 1000 tokens; 144 were handed over on average.")
    assert transferred(ServingShape(prompt_tokens=128), {}) == ({}, "no prompt was handed over.")
