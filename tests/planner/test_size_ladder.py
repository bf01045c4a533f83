"""The choice of size is deterministic, fits the machine, and grows with the budget."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from machines import machine
from twostroke.core.errors import ConfigError
from twostroke.core.train_settings import TrainSettings
from twostroke.planner.choosing.size_ladder import (
    LADDER,
    LEAST_STEPS,
    REPEAT_HALF_LIFE,
    effective_tokens,
    feed_forward_width,
    pick_model,
    predicted_loss,
    rank_models,
    rung,
)
from twostroke.planner.work.params import count_parameters

SETTINGS = TrainSettings(budget_s=300)


def test_the_same_question_has_the_same_answer() -> None:
    first = pick_model(300, 4096, 3_000_000, SETTINGS, machine())
    assert first == pick_model(300, 4096, 3_000_000, SETTINGS, machine())
    assert first.vocab_size == 4096
    assert first.max_positions == SETTINGS.sequence_length
    assert first.tied_embeddings


def test_the_pick_is_the_lowest_predicted_loss_of_the_ladder() -> None:
    ranked = rank_models(300, 4096, 3_000_000, SETTINGS, machine())
    assert 0 < len(ranked) <= len(LADDER)
    assert ranked[0].spec == pick_model(300, 4096, 3_000_000, SETTINGS, machine())
    assert ranked[0].predicted_loss == min(c.predicted_loss for c in ranked)
    for c in ranked:
        assert c.tokens == c.steps * 16 * 512
        assert c.n_parameters == count_parameters(c.spec).total


def test_more_time_never_picks_a_smaller_model() -> None:
    sizes = [
        count_parameters(pick_model(budget, 4096, 10**12, SETTINGS, machine())).total
        for budget in (60, 300, 3600, 86400, 10**7)
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_little_text_favours_a_larger_model_over_reading_it_again() -> None:
    plenty, little = (count_parameters(pick_model(86400, 4096, n, SETTINGS, machine())).total for n in (10**12, 10**5))
    assert little >= plenty


def test_every_rung_is_a_valid_shape_and_they_go_up() -> None:
    specs = [rung(heads, layers, 4096, 512) for heads, layers in LADDER]
    sizes = [count_parameters(s).block_matrices for s in specs]
    assert sizes == sorted(sizes)
    for spec in specs:
        assert spec.d_model == 64 * spec.n_heads
        assert spec.d_ff % 64 == 0
        assert 8 / 3 <= spec.d_ff / spec.d_model < 8 / 3 + 64 / spec.d_model
    assert feed_forward_width(256) == 704


def test_models_that_do_not_fit_are_left_out() -> None:
    small = dataclasses.replace(machine(), memory_bytes=1.5e9)
    ranked = rank_models(300, 4096, 3_000_000, SETTINGS, small)
    assert 0 < len(ranked) < len(LADDER)
    with pytest.raises(ConfigError, match="smaller batch"):
        rank_models(300, 4096, 3_000_000, SETTINGS, dataclasses.replace(machine(), memory_bytes=1e6))


def test_repeated_tokens_are_worth_less_each_time() -> None:
    assert effective_tokens(50, 100) == 50
    assert effective_tokens(100, 100) == 100
    values = [effective_tokens(100 * epochs, 100) for epochs in range(1, 40)]
    gains = [b - a for a, b in itertools.pairwise(values)]
    assert all(b < a for a, b in itertools.pairwise(gains))
    assert values[-1] < 100 * (1 + REPEAT_HALF_LIFE)


def test_loss_falls_with_parameters_and_with_tokens() -> None:
    assert predicted_loss(2e6, 1e7, 1e9) < predicted_loss(1e6, 1e7, 1e9)
    assert predicted_loss(1e6, 2e7, 1e9) < predicted_loss(1e6, 1e7, 1e9)


@pytest.mark.parametrize(
    ("name", "arguments"), [("budget_s", (0, 10, 10)), ("vocab_size", (9, -1, 10)), ("n_train_tokens", (9, 10, 0))]
)
def test_impossible_questions_are_refused_by_name(name: str, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=name):
        rank_models(*arguments, SETTINGS, machine())


def test_a_budget_too_short_for_any_rung_takes_the_smallest() -> None:
    ranked = rank_models(1e-6, 4096, 3_000_000, SETTINGS, machine())
    assert [(c.spec.n_heads, c.spec.n_layers) for c in ranked] == [LADDER[0]]
    assert all(c.steps >= LEAST_STEPS for c in rank_models(300, 4096, 3_000_000, SETTINGS, machine())[1:])
