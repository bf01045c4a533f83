"""Energy and money, with the price and the watts that were assumed, and the point where serving has cost more than training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twostroke.planner.hardware import Hardware, Price, price


@dataclass(frozen=True)
class Cost:
    """Device time in money and energy. ``usd`` is rent for the time; ``energy_usd`` what the electricity alone would cost on
    a machine of one's own (rent includes it, so the two are not added)."""

    seconds: float
    energy_kwh: float
    usd: float
    energy_usd: float
    watts: Price
    usd_per_hour: Price
    electricity: Price

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "energy_kwh": self.energy_kwh,
            "usd": self.usd,
            "energy_usd": self.energy_usd,
            "watts": vars(self.watts),
            "usd_per_hour": vars(self.usd_per_hour),
            "electricity_usd_per_kwh": vars(self.electricity),
        }


def energy_kwh(seconds: float, watts: float, pue: float) -> float:
    """kWh = W · h · PUE / 1000."""
    return watts * seconds / 3600 * pue / 1000


def rent_usd(seconds: float, usd_per_hour: float) -> float:
    """$ = h · $/h."""
    return seconds / 3600 * usd_per_hour


def cost_of(seconds: float, hardware: Hardware) -> Cost:
    """Money and energy of ``seconds`` of ``hardware`` at its watts, its price and the assumed tariff."""
    electricity, pue = price("electricity_usd_per_kwh"), price("pue")
    energy = energy_kwh(seconds, hardware.watts.value, pue.value)
    return Cost(
        seconds,
        energy,
        rent_usd(seconds, hardware.usd_per_hour.value),
        energy * electricity.value,
        hardware.watts,
        hardware.usd_per_hour,
        electricity,
    )


def usd_per_million_tokens(tok_per_s: float, usd_per_hour: float, utilisation: float = 1.0) -> float:
    """$/Mtok = $/h · 10⁶ / (3600 · tokens/s · utilisation)."""
    return usd_per_hour * 1e6 / (3600 * tok_per_s * utilisation)


def crossover_tokens(training_usd: float, serving_usd_per_million_tokens: float) -> float:
    """Served tokens after which serving has cost more than training: training $ ÷ ($ per token)."""
    return training_usd / serving_usd_per_million_tokens * 1e6
