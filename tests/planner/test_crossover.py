"""Both bills by hand, by sums and as published; what a tenth is worth; the API beside it; impossible numbers are sentences."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import machine, small_llama
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.planner.choosing.crossover import (
    DAYS_PER_MONTH,
    Demand,
    Energy,
    PaidByReplica,
    PaidByRequest,
    break_even_requests_per_day,
    own_serving,
    plan_crossover,
)
from twostroke.planner.hardware.tables import load_hardware, price
from twostroke.planner.money.api_prices import ApiPrice
from twostroke.planner.money.cost import ProjectInputs, project_cost
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.text.crossover import crossover_text

FIVE_MILLION = project_cost(5e6, ProjectInputs())
API = ApiPrice("vendor-1", "vendor", 1.0, 2.0, None, "a test", "2026")


def demand(requests_per_day: float = 1000.0, growth: float = 0.0) -> Demand:
    return Demand(requests_per_day, 400, 100, growth)


# -- published claims ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("usd", "a_year", "months"), [(0.001, 10e6, 6.0), (0.005, 50e6, 1.2)])
def test_a_5_m_model_with_10_g_queries_costs_10_to_50_m_a_year_and_crosses_within_months(
    usd: float, a_year: float, months: float
) -> None:
    plan = plan_crossover(FIVE_MILLION, demand(10e9 / 365.25), PaidByRequest(usd), horizon_months=12)
    assert plan.serving_usd == pytest.approx(a_year)
    assert plan.day == pytest.approx(months * DAYS_PER_MONTH)
    assert plan.requests == pytest.approx(5e6 / usd)


def test_a_billion_queries_a_day_at_a_tenth_of_a_cent_is_a_million_a_day() -> None:
    plan = plan_crossover(FIVE_MILLION, demand(1e9), PaidByRequest(0.001))
    assert plan.serving.usd_until(plan.demand, 1) == pytest.approx(1e6)
    assert plan.day == pytest.approx(5.0)
    assert plan.tokens == pytest.approx(5e9 * 500)
    assert plan.output_tokens == pytest.approx(5e9 * 100)


def test_a_tenth_of_a_recurring_cost_outweighs_a_tenth_of_a_one_time_cost_once_it_has_crossed() -> None:
    year = plan_crossover(FIVE_MILLION, demand(1e9), PaidByRequest(0.001), horizon_months=12).saved_usd
    assert year == (pytest.approx(0.5e6), pytest.approx(36.525e6))
    day = plan_crossover(FIVE_MILLION, demand(1e9), PaidByRequest(0.001), horizon_months=1 / DAYS_PER_MONTH).saved_usd
    assert day.serving < day.training


# -- formulae -------------------------------------------------------------------------------------------------------------


@given(st.floats(-0.5, 1.0), st.floats(1, 1000))
@settings(deadline=None)
def test_growing_demand_is_the_sum_of_its_moments(growth: float, days: float) -> None:
    """Against a midpoint sum of 2,000 slices, whose error is below a millionth for the steepest growth here."""
    grown = demand(1000.0, growth)
    n = 2000
    slices = sum(grown.requests_on((i + 0.5) * days / n) for i in range(n)) * days / n
    assert grown.requests_until(days) == pytest.approx(slices, rel=1e-4)
    found = grown.day_of(grown.requests_until(days))
    assert found is not None
    assert found == pytest.approx(days, rel=1e-3)  # a demand that has all but died out carries its last days in its last digits


def test_doubling_monthly_by_hand() -> None:
    doubling = demand(1000.0, 1.0)
    assert doubling.requests_on(DAYS_PER_MONTH) == pytest.approx(2000)
    assert doubling.requests_until(DAYS_PER_MONTH) == pytest.approx(1000 * DAYS_PER_MONTH / math.log(2))


def test_a_shrinking_demand_may_never_get_there() -> None:
    halving = demand(1000.0, -0.5)
    in_all = 1000 * DAYS_PER_MONTH / math.log(2)
    assert halving.day_of(in_all * 1.01) is None
    assert plan_crossover(FIVE_MILLION, halving, PaidByRequest(0.001)).day is None
    assert "never" in crossover_text(plan_crossover(FIVE_MILLION, halving, PaidByRequest(0.001)), "x")


def test_replicas_are_whole_and_at_least_one() -> None:
    paid = PaidByReplica(usd_per_replica_day=10.0, requests_per_replica_day=400)
    assert paid.replicas(demand(1000), 0) == 3
    assert paid.replicas(demand(1), 0) == 1
    assert paid.usd_until(demand(1000), 2.5) == pytest.approx(75)
    assert paid.day_of(demand(1000), 75) == pytest.approx(2.5)


def test_replicas_of_a_growing_demand_are_bought_day_by_day() -> None:
    paid, grown = PaidByReplica(10.0, 400), demand(1000, 1.0)
    by_hand = sum(10 * math.ceil(1000 * 2 ** (d / DAYS_PER_MONTH) / 400) for d in range(60))
    assert paid.usd_until(grown, 60) == pytest.approx(by_hand)
    assert paid.day_of(grown, by_hand) == pytest.approx(60)


@given(st.floats(10, 1e6), st.floats(-0.2, 0.5), st.floats(1, 3000))
@settings(deadline=None, max_examples=30)
def test_on_the_day_of_the_crossover_both_have_cost_the_same(requests: float, growth: float, usd: float) -> None:
    for serving in (PaidByRequest(0.002), PaidByReplica(20.0, 5000)):
        found = serving.day_of(demand(requests, growth), usd)
        if found is not None:
            assert serving.usd_until(demand(requests, growth), found) == pytest.approx(usd, rel=1e-6)


# -- one's own plan, and an API --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", ["on demand", "spot", "bought"])
def test_own_serving_agrees_by_request_by_replica_and_by_token(terms: str) -> None:
    planned = plan_serving(small_llama(), ServingShape(batch=4, prompt_tokens=100, output_tokens=50), machine())
    own = own_serving(planned, terms, 0.5)  # type: ignore[arg-type]
    assert own.tokens.request_usd(100, 50) == pytest.approx(own.by_request.usd_per_request)
    full = own.by_replica.usd_per_replica_day / own.by_replica.requests_per_replica_day
    assert full == pytest.approx(own.by_request.usd_per_request)
    assert sum(own.worked.parts.values()) == pytest.approx(own.worked.usd_per_hour.value)


def test_a_replica_of_two_devices_costs_twice_the_hour() -> None:
    shape = ServingShape(batch=4, prompt_tokens=100, output_tokens=50, tensor=2)
    planned = plan_serving(small_llama(), shape, load_hardware("h100"))
    own = own_serving(planned, "on demand", 1.0)
    assert own.by_replica.usd_per_replica_day == pytest.approx(2 * 24 * 2.95)
    assert own.by_request.usd_per_request == pytest.approx(planned.usd_per_mtok * 50 / 1e6)


def test_a_rented_replica_costs_its_rent_day_and_night() -> None:
    planned = plan_serving(small_llama(), ServingShape(batch=4, prompt_tokens=100, output_tokens=50), machine())
    rent = planned.hardware.usd_per_hour.value
    for utilisation in (0.1, 0.5, 1.0):
        own = own_serving(planned, "on demand", utilisation)
        assert own.by_replica.usd_per_replica_day == pytest.approx(24 * rent)
    assert own_serving(planned, "on demand", 1.0).by_request.usd_per_request == pytest.approx(planned.usd_per_mtok * 50 / 1e6)


def test_the_break_even_load_pays_one_replica() -> None:
    replica = PaidByReplica(usd_per_replica_day=24.0, requests_per_replica_day=100_000)
    assert break_even_requests_per_day(replica, 0.001) == pytest.approx(24_000)
    assert break_even_requests_per_day(replica, 0.0001) is None  # a full replica costs 24 $, the API 10 $


def test_an_api_is_overtaken_when_what_it_asks_more_has_paid_for_training() -> None:
    """400 + 100 tokens at 1 and 2 $ a million are 0.0006 $; at 0.0001 $ of one's own, 1,000 requests save 0.5 $ a day."""
    training = project_cost(100.0, ProjectInputs())
    plan = plan_crossover(training, demand(1000), PaidByRequest(0.0001), 12, API, PaidByReplica(2.4, 24_000))
    assert plan.api is not None
    assert plan.api.usd_per_request == pytest.approx(0.0006)
    assert plan.api.repaid_day == pytest.approx(200, abs=0.02)  # bisection stops at a hundredth of a day
    assert plan.api.break_even_tokens_per_day == pytest.approx(4000 * 500)
    assert plan.api.horizon_usd == pytest.approx(0.6 * 365.25)
    dear = plan_crossover(training, demand(1000), PaidByRequest(0.0007), 12, API)
    assert dear.api is not None
    assert dear.api.repaid_day is None
    assert dear.api.break_even_requests_per_day is None


def test_energy_grows_with_the_requests() -> None:
    energy = Energy(training_kwh=100.0, kwh_per_request=0.001, grid=price("grid_kg_co2_per_kwh"), pue=price("pue_data_centre"))
    plan = plan_crossover(FIVE_MILLION, demand(1000), PaidByRequest(0.001), 12, energy=energy)
    assert plan.serving_kwh == pytest.approx(365.25)
    found = plain(plan)["energy"]
    assert found["serving_co2_kg"] == pytest.approx(365.25 * 1.58 * 0.45)  # cooling and supply included
    assert found["training_co2_kg"] == pytest.approx(71.1)
    assert "100 kWh (71.1 kg CO2) to train, 365 kWh (260 kg CO2) to serve 12 months" in crossover_text(plan, "x")
    assert plain(plan_crossover(FIVE_MILLION, demand(1000), PaidByRequest(0.001)))["energy"] is None


def test_prompts_that_an_api_has_read_before_are_cheaper() -> None:
    cached = dataclasses.replace(API, cached_usd_per_mtok=0.1)
    plan = plan_crossover(FIVE_MILLION, demand(), PaidByRequest(0.001), 12, cached, cached_share=0.5)
    assert plan.api is not None
    assert plan.api.usd_per_request == pytest.approx((200 * 1.0 + 200 * 0.1 + 100 * 2.0) / 1e6)
    with pytest.raises(ConfigError, match=r"cached_share=1\.5 must be between 0 and 1"):
        plan_crossover(FIVE_MILLION, demand(), PaidByRequest(0.001), 12, cached, cached_share=1.5)


def test_the_curve_is_the_bills() -> None:
    plan = plan_crossover(FIVE_MILLION, demand(1e9), PaidByRequest(0.001), 1, API)
    curve = plan.curve()
    assert plain(curve[0]) == {"day": 0.0, "training_usd": 5e6, "serving_usd": 0.0, "api_usd": 0.0}
    assert curve[-1].serving_usd == pytest.approx(plan.serving_usd)
    assert [p.serving_usd for p in curve] == sorted(p.serving_usd for p in curve)


def test_the_text_shows_every_item() -> None:
    plan = plan_crossover(FIVE_MILLION, demand(1e9, 0.05), PaidByReplica(1000.0, 1e6), 12, API, PaidByReplica(1000.0, 1e6))
    text = " ".join(crossover_text(plan, "llama").split())
    shown = ("crossover: day", "10% saved", "growing 5% a month", "vendor-1", "break-even", "replicas on the first day")
    for word in (*plan.training.items, *shown):
        assert word in text
    assert "$5,000,000" in text


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: demand(-1), r"requests_per_day=-1 must be a finite number above 0"),
        (lambda: demand(math.nan), "requests_per_day=nan"),
        (lambda: demand(1, -1.0), r"growth_per_month=-1 must be above -1"),
        (lambda: demand(1, 10.0), r"growth_per_month=10 .* Give 0\.1 for 10% a month"),
        (lambda: Demand(1, 0, 1), "prompt_tokens=0 must be at least 1"),
        (lambda: PaidByRequest(-0.1), "usd_per_request=-0.1"),
        (lambda: PaidByReplica(1, 0), "requests_per_replica_day=0"),
        (lambda: plan_crossover(FIVE_MILLION, demand(), PaidByRequest(1), 0), "months=0 must be above 0"),
        (lambda: plan_crossover(FIVE_MILLION, demand(), PaidByRequest(1), 1e6), "months=1e.06 must be"),
        (lambda: project_cost(-5.0, ProjectInputs()), "run_usd=-5"),
    ],
)
def test_impossible_numbers_are_sentences(ask: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ask()  # type: ignore[operator]
