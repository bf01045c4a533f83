"""Speculative decoding gives the figures of its paper (arXiv 2211.17192)."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.ledger.store import Ledger
from twostroke.planner.serving.shape import Speculation
from twostroke.planner.truth.drafts import draft_values, drafts_seen


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed_up"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
     (0.9, 10, 1.60, 6.86)],
)  # fmt: skip
def test_published_gains_of_a_free_draft(alpha: float, gamma: int, operations: float, speed_up: float) -> None:
    """Table 1, c = 0, to the digits printed there."""
    found = Speculation(gamma, alpha)
    assert found.speed_up == pytest.approx(speed_up, abs=0.006)
    assert found.operations == pytest.approx(operations, abs=0.006)


@pytest.mark.parametrize(("alpha", "cost", "expected"), [(0.75, 0.02, 3.2), (0.80, 0.04, 3.3), (0.82, 0.11, 2.5)])
def test_published_gains_of_t5_drafts(alpha: float, cost: float, expected: float) -> None:
    """Expected wall-time gains of English–German at γ = 7, printed with one digit."""
    assert Speculation(7, alpha, cost).speed_up == pytest.approx(expected, abs=0.055)


def test_checking_that_costs_more_than_a_step_takes_the_gain_away() -> None:
    found = Speculation(4, 0.8, 0.05)
    assert found.speed_up_of(1.0, 1.0) == pytest.approx(found.speed_up)
    assert found.speed_up_of(1.0, 5.0) < 1 < found.speed_up_of(1.0, 1.5)


def test_certain_and_hopeless_drafts() -> None:
    assert Speculation(4, 1.0).tokens_per_step == 5.0
    assert Speculation(4, 0.0).tokens_per_step == 1.0
    assert Speculation(4, 1 - 1e-9).tokens_per_step == pytest.approx(5.0, rel=1e-6)


def test_options_are_read_and_refused() -> None:
    assert Speculation.parse("4,0.8,0.05") == Speculation(4, 0.8, 0.05)
    assert Speculation.parse("4,0.8") == Speculation(4, 0.8, 0.0)
    for wrong in ("", "4", "4,x", "4,0.8,0,0", "a,b,c"):
        with pytest.raises(ConfigError, match="γ,α,c"):
            Speculation.parse(wrong)
    for wrong in ("0,0.8", "65,0.8", "4,1.2", "4,-0.1", "4,0.5,-1", "4,nan"):
        with pytest.raises(ConfigError, match="speculation's"):
            Speculation.parse(wrong)


@pytest.mark.parametrize(
    ("drafts", "tokens", "gamma"), [(4.2, 3.1, 4), (0.3, 1.2, 1), (2.0, 3.0, 2), (7.0, 1.0, 7), (3.0, 9.0, 3)]
)
def test_what_was_measured_gives_the_same_tokens_a_step(drafts: float, tokens: float, gamma: int) -> None:
    found = Speculation.measured(drafts, tokens)
    assert found.draft_tokens == gamma
    assert found.tokens_per_step == pytest.approx(min(tokens, gamma + 1.0), abs=1e-6)


def test_a_plan_expects_what_the_models_last_run_with_drafts_found(tmp_path: Path) -> None:
    ledger, model = Ledger(tmp_path / "ledger.sqlite"), tmp_path / "model"
    assert drafts_seen(model, "ngram", ledger) is None
    runs = [
        (model, "ngram", draft_values(100, 250, 400, 150)),
        (model, "auto", draft_values(100, 300, 500, 200)),
        (model, "draft:x", draft_values(100, 110, 100, 10)),
        (model, "off", draft_values(100, 100, 0, 0)),
        (tmp_path / "other", "ngram", draft_values(100, 500, 600, 400)),
    ]
    for directory, speculate, values in runs:
        run = ledger.freeze("generate", "m", {"directory": str(directory), "speculate": speculate}, {})
        ledger.measure(run, {"tpot_s": 0.1, **values})
    assert drafts_seen(model, "ngram", ledger) == Speculation.measured(5.0, 3.0)
    assert drafts_seen(model, "draft:x", ledger) == Speculation.measured(1.0, 1.1)
    assert drafts_seen(model, "off", ledger) is drafts_seen(model, "draft:y", ledger) is None
