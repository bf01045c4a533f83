"""The explanation of any plan: it is made once more, of numbers that remember how they came about."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

from twostroke.core.described import plain
from twostroke.core.named import inputs, recording
from twostroke.planner.comparison import Comparison
from twostroke.planner.crossover import Crossover
from twostroke.planner.explain.crossover import explain_crossover
from twostroke.planner.explain.term import Explanation
from twostroke.planner.explain.trace import Recorded
from twostroke.planner.explain.training import explain_training
from twostroke.planner.serving import ServingPlan, plan_serving
from twostroke.planner.training import TrainingPlan


def explanation_of(plan_again: Callable[[], object]) -> Explanation:
    """What ``plan_again`` names on the way to the numbers of its document."""
    record = Recorded()
    with recording(record):
        document = plain(plan_again())
    return record.explanation(document)


@singledispatch
def explain(plan: object) -> Explanation:
    """Every term of ``plan``. TypeError for what is no plan."""
    raise TypeError(f"{type(plan).__name__} is not a plan.")


@explain.register
def _(plan: TrainingPlan) -> Explanation:
    return explain_training(plan)


@explain.register
def _(plan: ServingPlan) -> Explanation:
    return explanation_of(lambda: plan_serving(inputs(plan.spec), inputs(plan.shape), inputs(plan.hardware)))


@explain.register
def _(plan: Comparison) -> Explanation:
    return explain_comparison(plan)


@explain.register
def _(plan: Crossover) -> Explanation:
    return explain_crossover(plan)


def explain_comparison(plan: Comparison) -> Explanation:
    """Both phases, each term named for its phase, and where serving has cost more than training."""
    terms = Explanation()
    terms.extend(explain(plan.training), "training")
    terms.extend(explain(plan.serving), "serving")
    training_usd = plan.crossover_served_tokens * plan.serving.usd_per_mtok / 1e6
    what = "the run's rent" if plan.training.cost else "one step's rent: the run's length is open"
    terms.add(
        "crossover", "crossover_served_tokens", plan.crossover_served_tokens, "tokens", "training_usd/usd_per_mtok·1e6",
        f"{what}; served tokens at which both phases have cost the same",
        training_usd=plan.training.cost.usd if plan.training.cost else training_usd,
    )  # fmt: skip
    return terms
