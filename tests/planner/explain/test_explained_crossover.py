"""Each formula of a crossover, evaluated with its numbers, gives the plan's own number."""

from __future__ import annotations

import pytest

from formulas import evaluate
from twostroke.planner.choosing.crossover import Demand, PaidByReplica, PaidByRequest, Serving, plan_crossover
from twostroke.planner.money.api_prices import api_price
from twostroke.planner.money.cost import ProjectInputs, project_cost
from twostroke.planner.truth.explain import explain

REPLICA = PaidByReplica(usd_per_replica_day=24.0, requests_per_replica_day=50_000)


@pytest.mark.parametrize("growth", [0.0, 0.07, -0.02])
@pytest.mark.parametrize("serving", [PaidByRequest(0.0003), REPLICA])
def test_every_term_of_a_crossover_evaluates_to_its_value(serving: Serving, growth: float) -> None:
    inputs = ProjectInputs(1, 2, 3, 4, 5, 6, 7, 8)
    plan = plan_crossover(
        project_cost(100.0, inputs), Demand(120_000, 300, 200, growth), serving, 12, api_price("gpt-5"), REPLICA
    )
    terms = explain(plan)
    for term in terms:
        assert evaluate(term.formula, term.substitutions) == pytest.approx(term.value, rel=1e-9), (
            term.symbol
        )  # the same numbers in another order
    assert terms["training_usd"].value == pytest.approx(plan.training.usd)
    assert terms["day"].value == plan.day
    assert terms["serving_usd"].value == plan.serving_usd
    # Whole replicas are added up day by day: no formula is better than a wrong one.
    assert (terms["day"].formula == "given") == isinstance(serving, PaidByReplica)
