"""``twostroke plan crossover`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.units import format_count, format_money
from twostroke.ledger.text import align
from twostroke.planner.choosing.crossover import DAYS_PER_MONTH, Crossover, OwnServing, PaidByReplica
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.cost import excluded_power, rent_and_power
from twostroke.planner.text.format import footnotes, notes_lines, wrapped


def format_days(day: float | None) -> str:
    """``182.6`` → ``day 183 (6.0 months)``; None: never."""
    if day is None:
        return "never within 50 years"
    months = day / DAYS_PER_MONTH
    return f"day {day:,.3g}" if months < 1 else f"day {day:,.0f} ({months:.3g} months)"


def crossover_text(plan: Crossover, subject: str, sources: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Where the bills meet, what a tenth is worth, the API beside it; then the bills, and ``sources`` of prices last."""
    demand, months = plan.demand, f"{plan.horizon_months:g} months"
    growth = f", growing {100 * demand.growth_per_month:g}% a month" if demand.growth_per_month else ""
    tokens = demand.requests_per_day * demand.tokens_per_request
    head = [
        f"Training and serving {subject} (everything below is predicted)",
        f"demand: {format_count(demand.requests_per_day)} requests a day of "
        f"{demand.prompt_tokens:,} + {demand.output_tokens:,} tokens ({format_count(tokens)} tokens a day){growth}",
    ]
    results = [
        f"crossover: {_crossover(plan)}",
        f"10% saved: {format_money(plan.saved_usd.training)} of training, once; "
        f"{format_money(plan.saved_usd.serving)} of serving in {months}",
        *_energy_lines(plan),
        *_api_lines(plan),
    ]
    bills = align(
        [
            ["training, once", ""],
            *([f"  {name}", format_money(usd)] for name, usd in plan.training.items.items() if usd or name == "final run"),
            ["  in all", format_money(plan.training.usd)],
            [f"serving, {months}", format_money(plan.serving_usd)],
            *_serving_rows(plan),
        ],
        right=(1,),
    )
    absent = [name for name, usd in plan.training.items.items() if not usd and name != "final run"]
    left_out = wrapped([f"not given, so $0: {', '.join(absent)}"]) if absent else []
    parts = [[*wrapped(head), *notes_lines(notes)], wrapped(results), [bills, *left_out]]
    if sources or plan.api or plan.energy:
        parts.append([footnotes([*sources, *_source_lines(plan)])])
    return "\n\n".join("\n".join(part) for part in parts)


def _source_lines(plan: Crossover) -> list[str]:
    """Where the grid's CO₂ and the API's price are from."""
    lines = []
    if plan.energy is not None:
        grid = plan.energy.grid
        lines.append(f"CO2 {grid.kind}: {grid.value:g} kg/kWh, PUE included ({grid.source}; {grid.date})")
    if plan.api is not None:
        lines.append(f"API price listed: {plan.api.price.source}; {plan.api.price.date}")
    return lines


def terms_lines(own: OwnServing, machine: Hardware) -> list[str]:
    """What tokens cost, prefill and decode apart, and the prices behind it with their sources."""
    usd = own.worked.usd_per_hour
    parts = ", ".join(f"{name} {format_money(value)}" for name, value in own.worked.parts.items())
    return [
        f"tokens: {format_money(own.tokens.input_usd_per_mtok)} a million in (prefill), "
        f"{format_money(own.tokens.output_usd_per_mtok)} out (decode), at {100 * own.utilisation:g}% use (assumed)",
        f"device {own.worked.terms}: {format_money(usd.value)} for an hour's work ({parts})",
        f"price {usd.kind}: {usd.source}; {usd.date}",
        rent_and_power(machine)[1],
        excluded_power(machine),
    ]


def _serving_rows(plan: Crossover) -> list[list[str]]:
    serving, demand = plan.serving, plan.demand
    if isinstance(serving, PaidByReplica):
        return [
            ["  a replica a day", format_money(serving.usd_per_replica_day)],
            ["  requests it serves a day", format_count(serving.requests_per_replica_day)],
            ["  replicas on the first day", f"{serving.replicas(demand, 0):,}"],
        ]
    first = serving.usd_until(demand, 1)
    return [
        ["  the first day", format_money(first)],
        ["  a request", format_money(first / demand.requests_until(1))],
    ]


def _crossover(plan: Crossover) -> str:
    if plan.day is None or plan.requests is None or plan.tokens is None:
        return f"{format_days(plan.day)}: serving does not come to cost what training did"
    return (
        f"{format_days(plan.day)}: from then on serving has cost more than training, after {format_count(plan.requests)} "
        f"requests, {format_count(plan.tokens)} tokens"
    )


def _energy_lines(plan: Crossover) -> list[str]:
    bill = plan.energy_bill
    if bill is None:
        return []
    phases = [
        ("to train", bill.training_kwh, bill.training_co2_kg),
        (f"to serve {plan.horizon_months:g} months", bill.serving_kwh, bill.serving_co2_kg),
    ]
    used = ", ".join(f"{_amount(kwh)} kWh ({_amount(co2)} kg CO2) {what}" for what, kwh, co2 in phases)
    return [f"energy: {used}"]


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _api_lines(plan: Crossover) -> list[str]:
    api = plan.api
    if api is None:
        return []
    price = api.price
    break_even = (
        "no load: a full replica costs more than the API"
        if api.break_even_requests_per_day is None or api.break_even_tokens_per_day is None
        else f"{format_count(api.break_even_tokens_per_day)} tokens ({format_count(api.break_even_requests_per_day)} requests) "
        "a day pay one replica of one's own"
    )
    return [
        f"API: {price.model} ({price.vendor}) asks ${price.input_usd_per_mtok:g} and ${price.output_usd_per_mtok:g} "
        "a million tokens in and out: "
        f"{format_money(api.usd_per_request)} a request, {format_money(api.horizon_usd)} in {plan.horizon_months:g} months",
        f"break-even: {break_even}",
        f"training repaid against the API: {format_days(api.repaid_day)}",
    ]
