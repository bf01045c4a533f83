"""``--explain``, which every plan takes: each number's formula, substituted numbers and source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from twostroke.planner.choosing.comparison import Comparison
    from twostroke.planner.choosing.crossover import Crossover
    from twostroke.planner.serving.plan import ServingPlan
    from twostroke.planner.training.plan import TrainingPlan

EXPLAIN = typer.Option(False, "--explain", help="Add each number's formula, substituted numbers and source.")


def with_terms(
    document: dict[str, Any], text: str, planned: TrainingPlan | ServingPlan | Comparison | Crossover
) -> tuple[dict[str, Any], str]:
    """A plan's document with its "terms", and its text with a line a term."""
    from twostroke.planner.truth.explain import explain, explanation_text

    terms = explain(planned)
    return {**document, "terms": terms.terms}, f"{text}\n{explanation_text(terms)}"
