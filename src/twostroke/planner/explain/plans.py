"""The explanation of any plan: it is made once more, of numbers that remember how they came about."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

from twostroke.core.described import plain
from twostroke.core.named import inputs, named, recording
from twostroke.planner.comparison import Comparison
from twostroke.planner.cost import crossover_tokens
from twostroke.planner.crossover import Crossover
from twostroke.planner.explain.crossover import explain_crossover
from twostroke.planner.explain.term import Explanation
from twostroke.planner.explain.trace import Recorded
from twostroke.planner.serving import ServingPlan, plan_serving
from twostroke.planner.training import TrainingPlan, plan_training


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
    found = plan.resilience
    hours = found.mtbf_device_hours if found is not None and found.mtbf_kind == "given" else None
    return explanation_of(
        lambda: plan_training(inputs(plan.spec), inputs(plan.shape), inputs(plan.hardware), inputs(plan.layout), hours)
    )


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
    what = "the run's rent" if plan.training.cost else "one step's rent: the run's length is open"
    spent = plan.training.cost.usd if plan.training.cost else plan.crossover_served_tokens * plan.serving.usd_per_mtok / 1e6

    def meeting() -> dict[str, float]:
        training_usd = named("training_usd", spent, "usd", what, section="crossover")
        usd_per_mtok = named("usd_per_mtok", plan.serving.usd_per_mtok, "usd", "the serving plan's", section="crossover")
        return {"tokens": crossover_tokens(training_usd, usd_per_mtok)}

    terms.terms += explanation_of(meeting).terms
    return terms
