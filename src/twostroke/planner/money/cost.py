"""Money and energy: device time that is rented, taken on spot or bought; what training costs beside it; tokens; storage.

Every price is an input with a source (``prices.toml``); a result names those it used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from twostroke.core.checks import check_amount, check_positive, check_share
from twostroke.core.described import As
from twostroke.core.errors import ConfigError
from twostroke.core.named import named
from twostroke.planner.hardware.device import Hardware, Price
from twostroke.planner.hardware.tables import HOURS_PER_YEAR, device_price, price

Terms = Literal["on demand", "spot", "bought"]


@dataclass(frozen=True)
class Cost:
    """Device time in money and energy, all devices together. ``energy_kwh`` is what their meters read; hosts are excluded, and
    cooling and supply (PUE) stand in ``site_kwh``, which electricity and CO₂ are of. ``energy_usd`` is what the electricity
    alone would cost on a machine of one's own: rent and a bought device's rate include it: never add them."""

    DOCUMENT = (
        "seconds n_devices terms energy_kwh site_kwh co2_kg usd energy_usd watts host_watts usd_per_hour "
        "electricity_usd_per_kwh pue grid_kg_co2_per_kwh"
    )

    seconds: Annotated[float, "s", "of each device"]
    energy_kwh: Annotated[float, "kWh", "at the devices; PUE and hosts are apart"]
    usd: Annotated[float, "$", "of the devices' time"]
    energy_usd: Annotated[float, "$", "of the electricity alone, which rent includes"]
    watts: Annotated[Price, "W", "of one device, on average"]
    usd_per_hour: Annotated[Price, "$ an hour of one device"]
    electricity: Annotated[Price, "$ a kWh", As("electricity_usd_per_kwh")]
    n_devices: Annotated[float, "devices; below 1 the part of one that is shared with other runs"] = 1
    co2_kg: Annotated[float, "kg of CO₂ at the grid's intensity"] = 0.0
    terms: Annotated[Terms, "on demand, spot or bought"] = "on demand"
    pue: Annotated[Price, "power usage effectiveness"] = field(default_factory=lambda: price("pue"))
    grid: Annotated[Price, "kg of CO₂ a kWh", As("grid_kg_co2_per_kwh")] = field(
        default_factory=lambda: price("grid_kg_co2_per_kwh")
    )
    host_watts: Annotated[Price | None, "W", "that a device's share of its server draws at most; null: not known"] = None

    @property
    def site_kwh(self) -> Annotated[float, "kWh", "with what cooling and supply add: energy_kwh · PUE"]:
        return self.energy_kwh * self.pue.value


@dataclass(frozen=True)
class DeviceRate:
    """$ for an hour in which one device works, and what it is made of: the parts add up to ``usd_per_hour.value``."""

    terms: Annotated[Terms, "on demand, spot or bought"]
    usd_per_hour: Annotated[Price, "$ an hour"]
    parts: Annotated[dict[str, float], "$ an hour by part"]


def energy_kwh(seconds: float, watts: float, pue: float = 1.0) -> float:
    """kWh = W · h · PUE / 1000; at the devices without a PUE."""
    return watts * seconds / 3600 * pue / 1000


def co2_kg(energy_kwh: float, grid_kg_per_kwh: float) -> float:
    """kg CO₂ = kWh · grid intensity. Making the devices is excluded. Proved by Llama 2's model card."""
    return energy_kwh * grid_kg_per_kwh


def pue_of(hardware: Hardware) -> Price:
    """What cooling and supply add where the device stands: the mean data centre, or nothing on a desk."""
    return price("pue_data_centre" if hardware.place == "data centre" else "pue")


def rent_usd(seconds: float, usd_per_hour: float) -> float:
    """$ = h · $/h."""
    return seconds / 3600 * usd_per_hour


def price_line(what: str, given: Price, amount: str) -> str:
    """``power datasheet: 700 W (NVIDIA's datasheet; 2023-03)``: what was taken as given, with its mark and source."""
    return f"{what} {given.kind}: {amount} ({given.source}; {given.date})"


def rent_and_power(hardware: Hardware) -> tuple[str, str]:
    """A line for the price and one for the limits of power that plans on ``hardware`` assume."""
    usd, watts, idle = hardware.usd_per_hour, hardware.watts, hardware.idle_watts
    limits = f"at most {watts.value:.4g} W, idle {idle.value:.3g} W {idle.kind}"
    return price_line("price", usd, f"${usd.value:.4g} an hour"), price_line("power", watts, limits)


def excluded_power(hardware: Hardware) -> str:
    """What the energy of devices leaves out: PUE, and the host with what it draws at most where that is known."""
    pue, host = pue_of(hardware), hardware.host_watts
    beside = "the host (processor, memory, fans, network)"
    if host is not None:
        beside += f", at most {host.value:.4g} W a device ({host.source}; {host.date})"
    cooling = f"PUE {pue.value:g} {pue.kind}: cooling and supply ({pue.source}; {pue.date})"
    return f"energy is the devices'. Not in it: {beside}; {cooling}"


# -- device time ----------------------------------------------------------------------------------------------------------


def on_demand_rate(hardware: Hardware) -> DeviceRate:
    """The device's rent."""
    return DeviceRate("on demand", hardware.usd_per_hour, {"rent": hardware.usd_per_hour.value})


def spot_rate(hardware: Hardware) -> DeviceRate:
    """Rent on spot and the work that interruptions lose: $/h · 1/(1 − interruptions/h · s lost each / 3600).

    A spot price that is not listed is ``spot_share_of_on_demand`` of the rent. Raises ConfigError where interruptions leave no
    time for work.
    """
    listed = device_price("device_spot_usd_per_hour", hardware.name)
    if listed is None:
        share = price("spot_share_of_on_demand")
        rent = hardware.usd_per_hour
        listed = Price(rent.value * share.value, "assumed", f"{share.value:g} of ${rent.value:.4g} on demand", share.date)
    often, lost_s = price("spot_interruptions_per_hour"), price("spot_lost_s_per_interruption")
    lost = often.value * lost_s.value / 3600
    if lost >= 1:
        raise ConfigError(f"{often.value:g} interruptions an hour of {lost_s.value:g} s each leave no time for work.")
    total = listed.value / (1 - lost)
    source = f"{listed.source}; {100 * lost:.2g}% of the time is lost to interruptions (assumed)"
    return DeviceRate(
        "spot",
        Price(total, listed.kind, source, listed.date),
        {"rent": listed.value, "lost to interruptions": total - listed.value},
    )


def bought_rate(hardware: Hardware, years: float | None = None, utilisation: float | None = None) -> DeviceRate:
    """An hour's work of a bought device: capex · (1 + host share) / (years · 8766 h · utilisation) + W·PUE/1000 · $/kWh.

    A purchase price that is not listed is ``purchase_hours_of_rent`` hours of rent; a whole machine's (a laptop's, a Mac's) has
    no host added. People, space, repair and interest are excluded. Raises ConfigError for years or utilisation out of range.
    """
    years = price("depreciation_years").value if years is None else years
    if not years > 0:
        raise ConfigError(f"years={years:g} of depreciation must be above 0. Give 3 to 5.")
    utilisation = check_share("utilisation", price("bought_utilisation").value if utilisation is None else utilisation)
    listed = device_price("device_purchase_usd", hardware.name)
    if listed is None:
        hours = price("purchase_hours_of_rent")
        listed = Price(hardware.usd_per_hour.value * hours.value, "assumed", f"{hours.value:,.0f} hours of rent", hours.date)
    worked_hours = years * HOURS_PER_YEAR * utilisation
    host = price("host_share_of_purchase").value if hardware.place == "data centre" else 0.0
    parts = {
        "device": listed.value / worked_hours,
        "server and network": listed.value * host / worked_hours,
        "electricity": energy_kwh(3600, hardware.watts.value, pue_of(hardware).value) * price("electricity_usd_per_kwh").value,
    }
    source = (
        f"bought for ${listed.value:,.0f} ({listed.source}) over {years:g} years, {100 * utilisation:g}% in use; electricity"
    )
    return DeviceRate("bought", Price(sum(parts.values()), "assumed", source, listed.date), parts)


def rate_of(hardware: Hardware, terms: Terms) -> DeviceRate:
    """The device's rate on those terms, at the assumed years and use."""
    return {"on demand": on_demand_rate, "spot": spot_rate, "bought": bought_rate}[terms](hardware)


def cost_of(
    seconds: float, hardware: Hardware, n_devices: float = 1, rate: DeviceRate | None = None, watts: float | None = None
) -> Cost:
    """Money, energy and CO₂ of ``seconds`` of ``n_devices``, each at ``watts`` on average (at its limit unless given), the rate
    (rent on demand unless given), the assumed tariff and grid. Raises ConfigError for a negative time or no device."""
    check_amount("seconds", seconds)
    check_positive("n_devices", n_devices)
    rate = rate or on_demand_rate(hardware)
    electricity, pue, grid = price("electricity_usd_per_kwh"), pue_of(hardware), price("grid_kg_co2_per_kwh")
    drawn = hardware.watts if watts is None else predicted_power(watts)
    energy = n_devices * energy_kwh(seconds, drawn.named("watts", "W"))
    energy = named("energy_kwh", energy, "kWh", "W·h/1000 of all devices", section="money")
    usd = n_devices * rent_usd(seconds, rate.usd_per_hour.named("usd_per_hour", "usd/h"))
    site = energy * pue.named("PUE", "")
    energy_usd = site * electricity.named("usd_per_kwh", "usd/kWh")
    co2 = co2_kg(site, grid.named("grid", "kg/kWh"))
    return Cost(
        seconds,
        energy,
        named("cost_usd", usd, "usd", f"device hours, {rate.terms}"),
        named("energy_usd", energy_usd, "usd", "electricity alone; rent includes it"),
        drawn,
        rate.usd_per_hour,
        electricity,
        n_devices,
        named("co2_kg", co2, "kg", "at the grid's mean intensity", section="money"),
        rate.terms,
        pue,
        grid,
        hardware.host_watts,
    )


def predicted_power(watts: float) -> Price:
    """A mean power that ``money.power`` predicted."""
    return Price(
        watts, "predicted", "idle, and what reading, computing and exchanging add (planner/money/power.py)", "this plan"
    )


def bill(values: Mapping[str, Any], hardware: Hardware, watts: float | None, n_devices: float = 1) -> dict[str, float]:
    """Money, and with ``watts`` of all devices energy, by their ledger names. They follow from ``values``: a run's from
    ``train_time_s``, ``sweep_s`` or ``elapsed_s``, a million tokens' from ``output_tok_per_s`` or ``scored_tok_per_s``. They
    are predicted where those are, and measured where those are."""
    found: dict[str, float] = {}
    rate = values.get("output_tok_per_s", values.get("scored_tok_per_s"))
    seconds = values.get("train_time_s", values.get("sweep_s", values.get("elapsed_s")))
    usd_per_hour = n_devices * hardware.usd_per_hour.value
    if rate:
        found["cost_per_mtok_usd"] = usd_per_million_tokens(rate, usd_per_hour)
        found |= {} if watts is None else {"energy_per_mtok_kwh": energy_kwh(1e6 / rate, watts)}
    if seconds:
        found["cost_usd"] = rent_usd(seconds, usd_per_hour)
        found |= {} if watts is None else {"energy_kwh": energy_kwh(seconds, watts)}
    return found


# -- a training project ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProjectInputs:
    """What a training project costs beside its final run. All 0 unless given: nobody else knows them.

    ``repeated_runs``: sweeps, ablations and failures, in runs of the final's size. ``stored_gb`` for ``storage_months``: data
    and checkpoints. Raises ConfigError for a negative amount.
    """

    data_acquisition_usd: Annotated[float, "$", "of getting the data"] = 0.0
    data_cleaning_usd: Annotated[float, "$", "of cleaning it"] = 0.0
    people_months: Annotated[float, "months", "of one person"] = 0.0
    repeated_runs: Annotated[float, "in runs of the final's size"] = 0.0
    evaluation_usd: Annotated[float, "$", "of judging the model"] = 0.0
    stored_gb: Annotated[float, "GB", "of data and checkpoints that are kept"] = 0.0
    storage_months: Annotated[float, "months", "that they are kept"] = 0.0
    egress_gb: Annotated[float, "GB", "moved out of a cloud"] = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            check_amount(f.name, getattr(self, f.name))


@dataclass(frozen=True)
class ProjectCost:
    """$ by item, in the order they are shown; the final run first."""

    inputs: Annotated[ProjectInputs, "what was given"]
    items: Annotated[dict[str, float], "$", "by item, the final run first", As("items_usd")]

    @property
    def usd(self) -> Annotated[float, "$", "in all"]:
        source = "the run and the costs beside it that are often forgotten"
        return named("training_usd", sum(self.items.values()), "usd", source, section="training")


def project_cost(run_usd: float, inputs: ProjectInputs) -> ProjectCost:
    """run · (1 + repeated runs) + data + people + evaluation + storage + egress, each by itself."""
    check_amount("run_usd", run_usd)
    return ProjectCost(
        inputs,
        {
            "final run": run_usd,
            "repeated runs": run_usd * inputs.repeated_runs,
            "data acquisition": inputs.data_acquisition_usd,
            "data cleaning": inputs.data_cleaning_usd,
            "people": inputs.people_months * price("person_usd_per_month").named("person_usd", "usd/month"),
            "evaluation": inputs.evaluation_usd,
            "storage": storage_usd(inputs.stored_gb * 1e9, inputs.storage_months),
            "egress": inputs.egress_gb * price("egress_usd_per_gb").named("egress_usd", "usd/GB"),
        },
    )


def storage_usd(n_bytes: float, months: float) -> float:
    """$ = GB · months · $/GB-month."""
    return n_bytes / 1e9 * months * price("storage_usd_per_gb_month").named("storage_usd", "usd/GB/month")


# -- tokens ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenPrices:
    """$ per million tokens, prefill and decode apart: what an input and an output token cost."""

    input_usd_per_mtok: Annotated[float, "$ per million tokens of prompts"]
    output_usd_per_mtok: Annotated[float, "$ per million tokens of answers"]

    def request_usd(self, prompt_tokens: float, output_tokens: float) -> float:
        return (prompt_tokens * self.input_usd_per_mtok + output_tokens * self.output_usd_per_mtok) / 1e6


def token_prices(
    prefill_tok_per_s: float, decode_tok_per_s: float, usd_per_hour: float, utilisation: float = 1.0
) -> TokenPrices:
    """Both phases by the time they take of the same machine: a token's seconds are 1/rate."""
    into = usd_per_million_tokens(prefill_tok_per_s, usd_per_hour, utilisation)
    out = usd_per_million_tokens(decode_tok_per_s, usd_per_hour, utilisation)
    return TokenPrices(
        named("input_usd_per_mtok", into, "usd", "per million prompt tokens, never idle"),
        named("output_usd_per_mtok", out, "usd", "per million output tokens, prefill apart, never idle"),
    )


def usd_per_million_tokens(tok_per_s: float, usd_per_hour: float, utilisation: float = 1.0) -> float:
    """$/Mtok = $/h · 10⁶ / (3600 · tokens/s · utilisation). Raises ConfigError for a utilisation out of range."""
    return usd_per_hour * 1e6 / (3600 * tok_per_s * check_share("utilisation", utilisation))


def crossover_tokens(training_usd: float, serving_usd_per_million_tokens: float) -> float:
    """Served tokens after which serving has cost more than training: training $ ÷ ($ per token)."""
    tokens = training_usd / serving_usd_per_million_tokens * 1e6
    source = "served tokens at which both phases have cost the same"
    return named("crossover_served_tokens", tokens, "tokens", source, section="crossover")
