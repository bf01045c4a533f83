"""The terms of energy and money, which every plan shares."""

from __future__ import annotations

from twostroke.planner.cost import Cost, pue_of
from twostroke.planner.explain.term import Explanation, Mark
from twostroke.planner.hardware import Hardware, Price, price

_MARKS: dict[str, Mark] = {"listed": "given", "datasheet": "datasheet", "assumed": "assumed", "measured": "measured"}


def _price(terms: Explanation, symbol: str, unit: str, found: Price) -> None:
    terms.add(
        "money", symbol, found.value, unit, "given", f"{found.kind}, {found.source}; {found.date}",
        _MARKS.get(found.kind, "given"), given=found.value,
    )  # fmt: skip


def explain_prices(terms: Explanation, hardware: Hardware) -> None:
    """What was taken as given: rent, watts, tariff, PUE, each with its source."""
    _price(terms, "usd_per_hour", "usd/h", hardware.usd_per_hour)
    _price(terms, "watts", "W", hardware.watts)
    _price(terms, "usd_per_kwh", "usd/kWh", price("electricity_usd_per_kwh"))
    _price(terms, "PUE", "", pue_of(hardware))


def explain_run_cost(terms: Explanation, cost: Cost | None, hardware: Hardware) -> None:
    """Energy, CO₂ and rent of a run; nothing while its length is open."""
    if cost is None:
        return
    _price(terms, "usd_per_hour", "usd/h", cost.usd_per_hour)
    _price(terms, "watts", "W", cost.watts)
    _price(terms, "usd_per_kwh", "usd/kWh", cost.electricity)
    _price(terms, "PUE", "", cost.pue)
    _price(terms, "grid", "kg/kWh", cost.grid)
    time = "wall_time_s" if any(t.symbol == "wall_time_s" and t.value == cost.seconds for t in terms) else "train_time_s"
    terms.add(
        "money", "energy_kwh", cost.energy_kwh, "kWh", f"n_devices·watts·{time}/3600·PUE/1000", "kWh = W·h·PUE/1000",
        n_devices=cost.n_devices,
    )  # fmt: skip
    terms.add("money", "co2_kg", cost.co2_kg, "kg", "energy_kwh·grid", "at the grid's mean intensity")
    terms.add(
        "money", "cost_usd", cost.usd, "usd", f"n_devices·{time}/3600·usd_per_hour", f"device hours, {cost.terms}",
        n_devices=cost.n_devices,
    )  # fmt: skip
    terms.add("money", "energy_usd", cost.energy_usd, "usd", "energy_kwh·usd_per_kwh", "electricity alone; rent includes it")
