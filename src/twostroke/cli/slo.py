"""The options that ask for a latency, which ``serve`` and ``plan serve`` share, and what is chosen for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from twostroke.core.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.core.spec import ModelSpec
    from twostroke.planner.choosing.server_settings import Fixed, ServerChoice
    from twostroke.planner.hardware.device import Hardware
    from twostroke.planner.serving.shape import ServingShape
    from twostroke.planner.serving.under_load import Slo

SLO_TTFT = typer.Option(0.0, "--slo-ttft-ms", help="Highest mean time to the first token, in ms.")
SLO_TPOT = typer.Option(0.0, "--slo-tpot-ms", help="Highest mean time per output token, in ms.")
MODE = typer.Option(
    "",
    metavar="latency|throughput",
    help="Preset of these: latency keeps near what one request alone finds, throughput has no limit.",
)
SPREAD = typer.Option(0.0, help="Share by which prompts and answers vary around their lengths, 0 to 1; simulated load only.")
PREFIX_HITS = typer.Option(0.0, "--prefix-hits", help="Share of a prompt's tokens that are in the cache already, 0 to 1.")
MOST_SLO_MS = 1e9
"""Eleven days."""


class Asked(NamedTuple):
    """What was asked of a latency, in ms (0: nothing), and by a mode ("": none)."""

    ttft_ms: float
    tpot_ms: float
    mode: str

    @property
    def anything(self) -> bool:
        return bool(self.ttft_ms or self.tpot_ms or self.mode)

    def slo(self) -> Slo:
        """Raises ConfigError for an impossible limit or an unknown mode."""
        from twostroke.planner.choosing.server_settings import MODES
        from twostroke.planner.serving.under_load import Slo

        for name, value in (("--slo-ttft-ms", self.ttft_ms), ("--slo-tpot-ms", self.tpot_ms)):
            check_option(name, value, MOST_SLO_MS)
        if self.mode and self.mode not in MODES:
            raise ConfigError(f"--mode={self.mode!r} is not known. Use one of {', '.join(MODES)}.")
        return Slo(self.ttft_ms / 1e3 if self.ttft_ms else None, self.tpot_ms / 1e3 if self.tpot_ms else None)


def check_option(name: str, value: float, most: float) -> None:
    """Raises ConfigError unless ``value`` is from 0 to ``most``."""
    if not 0 <= value <= most:
        raise ConfigError(f"{name}={value:g} must be above 0 and at most {most:g}. Leave it out for none.")


def chosen_server(
    directory: Path | None, spec: ModelSpec, shape: ServingShape, hardware: Hardware, asked: Asked, spread: float,
    fixed: Fixed, own_weights: bool, own_cache: bool,
) -> ServerChoice:  # fmt: skip
    """What our engine's server is set to for what was asked, ``shape`` being its weights, cache and expected requests."""
    from twostroke.planner.choosing.server_settings import choose_server

    return choose_server(directory, spec, shape, hardware, asked.slo(), asked.mode, spread, fixed, own_weights, own_cache)
