"""When serving has cost more than training: the day, the request and the token; what a tenth saved of either is worth; what an
API would ask for the same tokens.

Training is paid once, serving every day, so that the answer depends on the demand above all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

from twostroke.core.checks import check_count, check_positive, check_share
from twostroke.core.described import As, LeftOut
from twostroke.core.errors import ConfigError
from twostroke.core.named import exponential_less_1, letter, logarithm_of_1_plus, named
from twostroke.planner.hardware.device import Price
from twostroke.planner.money.api_prices import ApiPrice
from twostroke.planner.money.cost import DeviceRate, ProjectCost, Terms, TokenPrices, bought_rate, co2_kg, rate_of, token_prices
from twostroke.planner.serving.plan import ServingPlan

DAYS_PER_MONTH = 365.25 / 12
SECONDS_PER_DAY = 86400

LIMIT_DAYS = 50 * 365.25
"""Days, 50 years: a later crossover counts as never."""

LIMIT_GROWTH_PER_MONTH = 1.0
"""Twice as much every month. More is taken for 10 where 10% was meant."""

SAVED = 0.1
"""The share whose saving is weighed in training and in serving: the claim is about a tenth."""


@dataclass(frozen=True)
class Demand:
    """Requests a day at the start, their lengths, and the share by which they grow in a month. Raises ConfigError."""

    requests_per_day: Annotated[float, "on the first day"]
    prompt_tokens: Annotated[int, "of a request"]
    output_tokens: Annotated[int, "of an answer"]
    growth_per_month: Annotated[float, "share by which requests grow"] = 0.0

    def __post_init__(self) -> None:
        check_positive("requests_per_day", self.requests_per_day)
        check_count("prompt_tokens", self.prompt_tokens)
        check_count("output_tokens", self.output_tokens)
        if not -1 < self.growth_per_month <= LIMIT_GROWTH_PER_MONTH:
            raise ConfigError(
                f"growth_per_month={self.growth_per_month:g} must be above -1 and at most {LIMIT_GROWTH_PER_MONTH:g}. "
                "Give 0.1 for 10% a month."
            )

    @property
    def tokens_per_request(self) -> int:
        tokens = self.prompt_tokens + self.output_tokens
        return named("tokens_per_request", tokens, "tokens", "both phases", section="demand")

    @property
    def tokens_per_day(self) -> Annotated[float, "tokens", "of prompts and answers on the first day"]:
        return self.requests_per_day * self.tokens_per_request

    def requests_on(self, day: float) -> float:
        """Rate after ``day`` days, in requests a day: r·(1+g)^(day/month)."""
        return self.requests_per_day * (1 + self.growth_per_month) ** (day / DAYS_PER_MONTH)

    @property
    def daily_growth(self) -> float:
        """ln(1+g) a day; 0 if below 10⁻¹⁵, because the formulae with growth divide by it."""
        rate = logarithm_of_1_plus(self.growth_per_month) / DAYS_PER_MONTH
        return named("daily_growth", rate, "", "ln(1 + g) a day", section="demand") if not -1e-15 <= rate <= 1e-15 else 0.0

    def requests_until(self, day: float) -> float:
        """Requests of the first ``day`` days: r·day, or with growth r·month/ln(1+g)·((1+g)^(day/month) − 1)."""
        rate = self.daily_growth
        return self.requests_per_day * (exponential_less_1(rate * day) / rate if rate else day)

    def day_of(self, requests: float) -> float | None:
        """Days until so many requests have come, the inverse of ``requests_until``; None where a shrinking demand never gets
        there."""
        rate, days = self.daily_growth, requests / self.requests_per_day
        if rate == 0:
            return days
        return logarithm_of_1_plus(days * rate) / rate if days * rate > -1 else None


@dataclass(frozen=True)
class PaidByRequest:
    """Every request costs the same: machines are shared, or their number follows the load. Raises ConfigError."""

    paid: Annotated[str, "how: a request at a time"] = field(default="by request", init=False)
    usd_per_request: Annotated[float, "$"]

    def __post_init__(self) -> None:
        check_positive("usd_per_request", self.usd_per_request)

    def usd_until(self, demand: Demand, day: float) -> float:
        """$ of the first ``day`` days."""
        return self.usd_per_request * demand.requests_until(day)

    def day_of(self, demand: Demand, usd: float) -> float | None:
        """Days until ``usd`` are spent; None where they never are."""
        return demand.day_of(usd / self.usd_per_request)


@dataclass(frozen=True)
class PaidByReplica:
    """Whole replicas run day and night, as many as the day's first moment needs and at least one. Raises ConfigError."""

    paid: Annotated[str, "how: whole replicas, day and night"] = field(default="by replica", init=False)
    usd_per_replica_day: Annotated[float, "$", "a day of one replica"]
    requests_per_replica_day: Annotated[float, "requests a day that one replica carries"]

    def __post_init__(self) -> None:
        check_positive("usd_per_replica_day", self.usd_per_replica_day)
        check_positive("requests_per_replica_day", self.requests_per_replica_day)

    def replicas(self, demand: Demand, day: float) -> int:
        return max(1, math.ceil(demand.requests_on(day) / self.requests_per_replica_day))

    def usd_until(self, demand: Demand, day: float) -> float:
        if demand.daily_growth == 0:
            return self.usd_per_replica_day * day * self.replicas(demand, 0)
        whole = math.floor(day)
        replica_days = sum(self.replicas(demand, d) for d in range(whole)) + (day - whole) * self.replicas(demand, whole)
        return self.usd_per_replica_day * letter("replica_days", replica_days)

    def day_of(self, demand: Demand, usd: float) -> float | None:
        left = usd
        for day in range(int(LIMIT_DAYS)):
            today = self.usd_per_replica_day * self.replicas(demand, day)
            if left <= today:
                return day + left / today
            left -= today
        return None


Serving = PaidByRequest | PaidByReplica


@dataclass(frozen=True)
class ApiComparison:
    """The same requests at a vendor's price. ``break_even_requests_per_day`` pays one's own replica; None where a full replica
    costs more than the API would. ``repaid_day``: training and own serving have cost as much as the API; None if never."""

    DOCUMENT = "model price usd_per_request horizon_usd break_even_requests_per_day break_even_tokens_per_day repaid_day"

    price: Annotated[ApiPrice, "what its vendor asks"]
    usd_per_request: Annotated[float, "$", "of one request"]
    horizon_usd: Annotated[float, "$", "of the horizon's requests"]
    break_even_requests_per_day: Annotated[float | None, "requests a day that pay an own replica; null: it never pays"]
    repaid_day: Annotated[float | None, "day on which training is paid back; null: never"]
    tokens_per_request: int

    @property
    def model(self) -> Annotated[str, "the vendor's model"]:
        return self.price.model

    @property
    def break_even_tokens_per_day(self) -> Annotated[float | None, "the same in tokens, prompts included"]:
        requests = self.break_even_requests_per_day
        return None if requests is None else requests * self.tokens_per_request


@dataclass(frozen=True)
class Energy:
    """kWh of the final run and of a served request, both at the devices; idle machines draw nothing here."""

    training_kwh: float
    kwh_per_request: float
    grid: Price
    pue: Price


class EnergyBill(NamedTuple):
    """Energy of both phases over the horizon."""

    training_kwh: Annotated[float, "kWh", "of the final run, at the devices"]
    serving_kwh: Annotated[float, "kWh", "of serving, at the devices"]
    training_co2_kg: Annotated[float, "kg of CO₂ of the final run, PUE included"]
    serving_co2_kg: Annotated[float, "kg of CO₂ of serving, PUE included"]
    kwh_per_request: Annotated[float, "kWh", "of one request, at the devices"]
    grid_kg_co2_per_kwh: Annotated[Price, "kg of CO₂ a kWh"]
    pue: Annotated[Price, "power usage effectiveness"]


class Saved(NamedTuple):
    """$ that a tenth saved is worth over the horizon."""

    training: Annotated[float, "$", "once"]
    serving: Annotated[float, "$", "of all its days"]


class CrossoverPrediction(NamedTuple):
    """Where serving has cost more than training."""

    crossover_day: Annotated[float | None, "day; null: not within reach"]
    crossover_requests: Annotated[float | None, "requests served by then"]
    crossover_tokens: Annotated[float | None, "tokens by then, prompts included"]
    crossover_output_tokens: Annotated[float | None, "output tokens by then"]
    training_usd: Annotated[float, "$", "of training"]
    serving_usd: Annotated[float, "$", "of serving over the horizon"]
    saved_usd: Annotated[Saved, "what 10% is worth"]


class Point(NamedTuple):
    """Both bills on one day."""

    day: Annotated[float, "days since the start"]
    training_usd: Annotated[float, "$", "of training"]
    serving_usd: Annotated[float, "$", "of serving so far"]
    api_usd: Annotated[float | None, "$", "so far, bought from the API", LeftOut]


@dataclass(frozen=True)
class Crossover:
    """Everything predicted of the two bills. ``day`` is None where serving never costs as much as training."""

    DOCUMENT = "training demand serving horizon_months prediction api energy curve"

    training: Annotated[ProjectCost, "the training bill"]
    demand: Annotated[Demand, "requests"]
    serving: Annotated[Serving, "the serving bill"]
    horizon_months: Annotated[float, "months looked ahead"]
    day: float | None
    api: Annotated[ApiComparison | None, "the same requests bought from an API"] = None
    energy: Energy | None = None

    @property
    def requests(self) -> float | None:
        """Requests served by that day."""
        if self.day is None:
            return None
        return named("requests", self.demand.requests_until(self.day), "requests", "served by that day", section="crossover")

    @property
    def tokens(self) -> float | None:
        """Tokens served by that day, prompts included."""
        if self.requests is None:
            return None
        tokens = self.requests * self.demand.tokens_per_request
        return named("tokens", tokens, "tokens", "served by that day, prompts included", section="crossover")

    @property
    def output_tokens(self) -> float | None:
        if self.requests is None:
            return None
        tokens = self.requests * self.demand.output_tokens
        return named("output_tokens", tokens, "tokens", "of answers, by that day", section="crossover")

    @property
    def serving_usd(self) -> float:
        """$ of serving over the horizon."""
        usd = self.serving.usd_until(self.demand, letter("months", self.horizon_months) * DAYS_PER_MONTH)
        return named("serving_usd", usd, "usd", "over the horizon", section="crossover")

    @property
    def saved_usd(self) -> Saved:
        """$ that a tenth saved is worth over the horizon: once in training, every day in serving."""
        share = letter("saved", SAVED)
        training, serving = share * self.training.usd, share * self.serving_usd
        return Saved(
            named("training_saved", training, "usd", "saved once", section="crossover"),
            named("serving_saved", serving, "usd", "saved over the horizon", section="crossover"),
        )

    @property
    def prediction(self) -> Annotated[CrossoverPrediction, "the results"]:
        bills = self.training.usd, self.serving_usd, self.saved_usd
        return CrossoverPrediction(self.day, self.requests, self.tokens, self.output_tokens, *bills)

    @property
    def serving_kwh(self) -> float | None:
        """kWh of serving over the horizon; None where no machine was planned."""
        if self.energy is None:
            return None
        return self.energy.kwh_per_request * self.demand.requests_until(self.horizon_months * DAYS_PER_MONTH)

    @property
    def energy_bill(self) -> Annotated[EnergyBill | None, "of both phases, where a machine was planned", As("energy")]:
        energy, served = self.energy, self.serving_kwh
        if energy is None or served is None:
            return None
        trained, grid, pue = energy.training_kwh, energy.grid.value, energy.pue.value
        co2 = co2_kg(trained * pue, grid), co2_kg(served * pue, grid)
        return EnergyBill(trained, served, *co2, energy.kwh_per_request, energy.grid, energy.pue)

    def curve(self, n_points: int = 25) -> Annotated[list[Point], "both bills over the horizon"]:
        """Both bills at even distances, for a plot."""
        points = []
        for i in range(n_points):
            day = i / (n_points - 1) * self.horizon_months * DAYS_PER_MONTH
            api_usd = None if self.api is None else self.api.usd_per_request * self.demand.requests_until(day)
            points.append(Point(day, self.training.usd, self.serving.usd_until(self.demand, day), api_usd))
        return points


def plan_crossover(
    training: ProjectCost, demand: Demand, serving: Serving, horizon_months: float = 12.0, api: ApiPrice | None = None,
    replica: PaidByReplica | None = None, cached_share: float = 0.0, energy: Energy | None = None,
) -> Crossover:  # fmt: skip
    """Both bills of ``training`` and of ``serving`` under ``demand``, beside an API's. ``replica`` is one's own smallest unit,
    for the load at which it undercuts the API. Raises ConfigError for numbers out of range."""
    if not 0 < horizon_months * DAYS_PER_MONTH <= LIMIT_DAYS:
        raise ConfigError(f"months={horizon_months:g} must be above 0 and at most {LIMIT_DAYS / DAYS_PER_MONTH:g}.")
    if not 0 <= cached_share <= 1:
        raise ConfigError(f"cached_share={cached_share:g} must be between 0 and 1. Give 0.8 for 80%.")
    day = serving.day_of(demand, training.usd)
    day = None if day is None or day > LIMIT_DAYS else day
    plan = Crossover(training, demand, serving, horizon_months, day, None, energy)
    if api is None:
        return plan
    bill = PaidByRequest(api.request_usd(demand.prompt_tokens, demand.output_tokens, cached_share))
    comparison = ApiComparison(
        api,
        bill.usd_per_request,
        horizon_usd=bill.usd_until(demand, horizon_months * DAYS_PER_MONTH),
        break_even_requests_per_day=break_even_requests_per_day(replica, bill.usd_per_request) if replica else None,
        repaid_day=_repaid_day(training.usd, demand, serving, bill),
        tokens_per_request=demand.tokens_per_request,
    )
    return replace(plan, api=comparison)


def break_even_requests_per_day(replica: PaidByReplica, api_usd_per_request: float) -> float | None:
    """Requests a day whose API bill pays one replica, day and night; None where they are more than the replica can serve: then
    the API is cheaper at any load."""
    requests = replica.usd_per_replica_day / api_usd_per_request
    requests = named("break_even_requests_per_day", requests, "requests", "the API's bill pays one replica", section="api")
    return requests if requests <= replica.requests_per_replica_day else None


def _repaid_day(training_usd: float, demand: Demand, serving: Serving, api: PaidByRequest) -> float | None:
    """The first day on which training + own serving ≤ the API's bill, by bisection between the days of a doubling search."""

    def ahead(day: float) -> bool:
        return api.usd_until(demand, day) >= training_usd + serving.usd_until(demand, day)

    late = 1.0
    while not ahead(late):
        late *= 2
        if late > LIMIT_DAYS:
            return None
    early = late / 2 if late > 1 else 0.0
    while late - early > 0.01:
        middle = (early + late) / 2
        early, late = (early, middle) if ahead(middle) else (middle, late)
    return late


@dataclass(frozen=True)
class OwnServing:
    """What a serving plan costs on some terms, at a share of busy time: by the request, by the replica, and by the token with
    prefill and decode apart. ``worked`` is the rate of an hour in which a device works."""

    worked: DeviceRate
    utilisation: float
    by_request: PaidByRequest
    by_replica: PaidByReplica
    tokens: TokenPrices


def own_serving(
    plan: ServingPlan, terms: Terms, utilisation: float, years: float | None = None, output_tok_per_s: float | None = None
) -> OwnServing:
    """The plan's replica on ``terms``, its batch kept full while it works, at ``output_tok_per_s`` where that was simulated:
    $ = device hours of work · $ of a worked hour.

    Rented devices are paid while idle: worked hour = rate / utilisation. Bought ones wear out by the year and draw power by
    use. Raises ConfigError for a utilisation out of range.
    """
    check_share("utilisation", utilisation)
    if terms == "bought":
        worked = bought_rate(plan.hardware, years, utilisation)
    else:
        paid = rate_of(plan.hardware, terms)
        usd = replace(paid.usd_per_hour, value=paid.usd_per_hour.value / utilisation)
        worked = DeviceRate(terms, usd, {**paid.parts, "idle": usd.value - paid.usd_per_hour.value})
    replica_usd_per_hour = plan.devices * worked.usd_per_hour.value
    request_s = plan.shape.output_tokens / (output_tok_per_s or plan.output_tok_per_s)
    usd_per_request = replica_usd_per_hour * request_s / 3600
    requests_per_day = SECONDS_PER_DAY * utilisation / request_s
    return OwnServing(
        worked,
        utilisation,
        PaidByRequest(usd_per_request),
        PaidByReplica(requests_per_day * usd_per_request, requests_per_day),
        token_prices(plan.prefill_tok_per_s, plan.decode_tok_per_s, replica_usd_per_hour),
    )
