"""The explanation of any plan: it is made once more, of numbers that remember how they came about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch

from twostroke.core.described import plain
from twostroke.core.named import inputs, named, recording
from twostroke.core.units import format_bytes
from twostroke.planner.choosing.comparison import Comparison
from twostroke.planner.choosing.crossover import Crossover, PaidByReplica, break_even_requests_per_day
from twostroke.planner.money.cost import crossover_tokens, project_cost
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.truth.glossary import meaning
from twostroke.planner.truth.record import Explanation, Recorded, Term


def explanation_of(plan_again: Callable[[], object]) -> Explanation:
    """What ``plan_again`` names on the way to the numbers of its document."""
    record = Recorded()
    with recording(record):
        document = plain(plan_again())
    return record.explanation(document)


@singledispatch
def explain(plan: object) -> Explanation:
    """Every term of ``plan``. Raises TypeError for anything but a plan."""
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
def _(plan: Crossover) -> Explanation:
    return explanation_of(lambda: _crossover_again(plan))


@explain.register
def _(plan: Comparison) -> Explanation:
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


def _crossover_again(plan: Crossover) -> Crossover:
    """Whole replicas are added up day by day: the day on which they have cost enough has no formula."""
    run_usd = named("run_usd", plan.training.items["final run"], "usd", "the training plan's, or given", section="training")
    training = project_cost(run_usd, inputs(plan.training.inputs))
    demand, serving, day, api = inputs(plan.demand), inputs(plan.serving), plan.day, plan.api
    if day is not None:
        whole = isinstance(plan.serving, PaidByReplica)
        met = day if whole else serving.day_of(demand, training.usd)
        source = "serving has cost what training did" + (": whole replicas, added up day by day" if whole else "")
        day = named("day", met or day, "days", source, section="crossover")
    if api is not None:
        source = f"{api.price.model}, {api.price.vendor}: {api.price.source}; {api.price.date}"
        usd = named("api_usd_per_request", api.usd_per_request, "usd", source, "given", "api")
        requests = break_even_requests_per_day(serving, usd) if isinstance(serving, PaidByReplica) else None
        same = requests is not None and requests == api.break_even_requests_per_day
        api = replace(
            api, usd_per_request=usd, break_even_requests_per_day=requests if same else api.break_even_requests_per_day
        )
    return Crossover(training, demand, serving, plan.horizon_months, day, api, plan.energy)


def _value(term: Term) -> str:
    value = f"{term.value:,.0f}" if term.value == int(term.value) else f"{term.value:.6g}"
    if term.unit == "bytes" and abs(term.value) >= 1024:
        return f"{value} bytes ({format_bytes(term.value)})"
    return f"{value} {term.unit}".rstrip()


def term_line(term: Term) -> str:
    """``symbol = formula = numbers = value unit   [mark: source]``; an input has no formula to repeat."""
    if term.formula == "given":
        return f"{term.symbol} = {_value(term)}   [{term.mark}: {term.source}]"
    return f"{term.symbol} = {term.formula} = {term.substituted} = {_value(term)}   [{term.mark}: {term.source}]"


def explanation_text(explanation: Explanation) -> str:
    """All terms by section, then what each letter stands for."""
    lines, section = [], ""
    for term in explanation:
        if term.section != section:
            lines += ["", term.section]
            section = term.section
        lines.append(f"  {term_line(term)}")
    symbols = {term.symbol for term in explanation}
    letters = dict.fromkeys(name for term in explanation for name in term.used if name not in symbols)
    meanings = [f"  {name}: {text}" for name in letters if (text := meaning(name))]
    return "\n".join([*lines, "", "where", *meanings])
