"""What the planner knows of this engine's steps, on a machine that was calibrated."""

from __future__ import annotations

from pathlib import Path

from twostroke.core.engine_settings import OFF, EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import strategy_of
from twostroke.planner.serving.step_costs import pace_of
from twostroke.planner.serving.strategy import Strategy
from twostroke.quantization.held import serving_shape
from twostroke.scheduling.pace import Pace
from twostroke.scheduling.step import SchedulerConfig


def planned(directory: Path, spec: ModelSpec, settings: EngineSettings) -> Strategy | None:
    """How the engine of ``settings`` is planned; None on a machine that was not calibrated."""
    try:
        hardware = load_hardware("this", "serve")
    except ConfigError:
        return None
    return strategy_of(spec, serving_shape(directory, spec, settings), hardware)


def planned_pace(directory: Path, spec: ModelSpec, settings: EngineSettings, config: SchedulerConfig) -> Pace | None:
    """How prompts are bounded beside requests that decode; None where they are not. Raises ConfigError if a bound was asked for
    that no step times are known for."""
    if settings.max_step_ratio == OFF:
        return None
    strategy = planned(directory, spec, settings)
    if strategy is not None:
        return pace_of(strategy.step_seconds, settings.max_step_ratio, config.token_budget, config.page_tokens)
    if settings.max_step_ratio != "auto":
        raise ConfigError(
            f"max_step_ratio={settings.max_step_ratio} bounds steps by their planned times, and this machine was not "
            "calibrated. Run `twostroke calibrate --only serve`, or leave it out."
        )
    return None
