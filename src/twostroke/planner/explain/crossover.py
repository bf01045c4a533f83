"""The terms of the two bills: a training project, a demand, what serving it costs, the day they meet, an API's price."""

from __future__ import annotations

import math
from dataclasses import asdict

from twostroke.planner.crossover import DAYS_PER_MONTH, SAVED, ApiComparison, Crossover, PaidByReplica, PaidByRequest
from twostroke.planner.explain.term import Explanation
from twostroke.planner.hardware import price


def explain_crossover(plan: Crossover) -> Explanation:
    """Every number that has a formula. Whole replicas of a growing demand are added up day by day: their sums have none."""
    terms = Explanation()
    _explain_training(terms, plan)
    _explain_demand(terms, plan)
    serving = plan.serving
    if isinstance(serving, PaidByRequest):
        _given(
            terms,
            "serving",
            "usd_per_request",
            serving.usd_per_request,
            "usd",
            "the serving plan's, on the terms named, or given",
        )
        usd_per_day = "requests_per_day·usd_per_request"
    elif isinstance(serving, PaidByReplica):
        _given(terms, "serving", "usd_per_replica_day", serving.usd_per_replica_day, "usd", "24 h of a replica's devices")
        _given(
            terms, "serving", "requests_per_replica_day", serving.requests_per_replica_day, "requests", "86400·rate·utilisation"
        )
        terms.add(
            "serving", "replicas", serving.replicas(plan.demand, 0), "", "max(1, ⌈requests_per_day/requests_per_replica_day⌉)",
            "whole replicas on the first day",
        )  # fmt: skip
        usd_per_day = "replicas·usd_per_replica_day"
    else:
        return terms
    first = serving.usd_until(plan.demand, 0.5) * 2 if plan.demand.daily_growth == 0 else _rate_at_start(plan)
    terms.add("serving", "usd_per_day", first, "usd", usd_per_day, "at the rate of the first moment")
    if plan.demand.daily_growth == 0 or isinstance(serving, PaidByRequest):
        _explain_meeting(terms, plan)
    if plan.api is not None:
        _explain_api(terms, plan.api, serving)
    return terms


def _given(terms: Explanation, section: str, symbol: str, value: float, unit: str, source: str) -> None:
    terms.add(section, symbol, value, unit, "given", source, "given", given=value)


def _explain_training(terms: Explanation, plan: Crossover) -> None:
    inputs, items = plan.training.inputs, plan.training.items
    _given(terms, "training", "run_usd", items["final run"], "usd", "the training plan's, or given")
    for symbol, section, unit in (
        ("person_usd", "person_usd_per_month", "usd/month"),
        ("storage_usd", "storage_usd_per_gb_month", "usd/GB/month"),
        ("egress_usd", "egress_usd_per_gb", "usd/GB"),
    ):
        found = price(section)
        _given(terms, "training", symbol, found.value, unit, f"{found.kind}, {found.source}; {found.date}")
    terms.add(
        "training", "training_usd", plan.training.usd, "usd",
        "run_usd·(1 + repeated_runs) + data_acquisition_usd + data_cleaning_usd + people_months·person_usd + evaluation_usd"
        " + stored_gb·storage_months·storage_usd + egress_gb·egress_usd",
        "the run and the costs beside it that are often forgotten", **asdict(inputs),
    )  # fmt: skip


def _explain_demand(terms: Explanation, plan: Crossover) -> None:
    demand = plan.demand
    _given(terms, "demand", "requests_per_day", demand.requests_per_day, "requests", "at the start")
    _given(terms, "demand", "growth_per_month", demand.growth_per_month, "", "share")
    terms.add(
        "demand", "tokens_per_request", demand.tokens_per_request, "tokens", "prompt_tokens + output_tokens", "both phases",
        prompt_tokens=demand.prompt_tokens, output_tokens=demand.output_tokens,
    )  # fmt: skip
    if demand.daily_growth:
        terms.add(
            "demand", "daily_growth", demand.daily_growth, "", "log2(1 + growth_per_month)·ln2/month", "ln(1+g) a day",
            ln2=math.log(2), month=DAYS_PER_MONTH,
        )  # fmt: skip


def _rate_at_start(plan: Crossover) -> float:
    serving, demand = plan.serving, plan.demand
    if isinstance(serving, PaidByReplica):
        return serving.usd_per_replica_day * serving.replicas(demand, 0)
    return demand.requests_per_day * serving.usd_until(demand, 1.0) / demand.requests_until(1.0)


def _explain_meeting(terms: Explanation, plan: Crossover) -> None:
    """The day itself, what was served by then, and the horizon's bill; with growth, of requests that are paid one by one."""
    growing, days = plan.demand.daily_growth != 0, plan.horizon_months * DAYS_PER_MONTH
    if plan.day is not None and plan.requests is not None and plan.tokens is not None:
        meeting = "log2(1 + daily_growth·training_usd/usd_per_day)·ln2/daily_growth" if growing else "training_usd/usd_per_day"
        terms.add("crossover", "day", plan.day, "days", meeting, "serving has cost what training did", ln2=math.log(2))
        served = "requests_per_day·(2^(daily_growth·day/ln2) − 1)/daily_growth" if growing else "requests_per_day·day"
        terms.add("crossover", "requests", plan.requests, "requests", served, "served by that day", ln2=math.log(2))
        terms.add("crossover", "tokens", plan.tokens, "tokens", "requests·tokens_per_request", "served by that day")
    bill = "usd_per_day·(2^(daily_growth·days/ln2) − 1)/daily_growth" if growing else "usd_per_day·days"
    terms.add("crossover", "serving_usd", plan.serving_usd, "usd", bill, "over the horizon", days=days, ln2=math.log(2))
    for phase, source in (("training", "saved once"), ("serving", "saved over the horizon")):
        terms.add(
            "crossover", f"{phase}_saved", getattr(plan.saved_usd, phase), "usd", f"saved·{phase}_usd", source, saved=SAVED
        )


def _explain_api(terms: Explanation, api: ApiComparison, serving: PaidByRequest | PaidByReplica) -> None:
    found = api.price
    _given(
        terms,
        "api",
        "api_usd_per_request",
        api.usd_per_request,
        "usd",
        f"{found.model}, {found.vendor}: {found.source}; {found.date}",
    )
    if api.break_even_requests_per_day is not None and isinstance(serving, PaidByReplica):
        terms.add(
            "api", "break_even_requests_per_day", api.break_even_requests_per_day, "requests",
            "usd_per_replica_day/api_usd_per_request", "the API's bill pays one replica",
        )  # fmt: skip
