"""Makes the engine's command-line options of ``EngineSettings``."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import typer

from twostroke.core.engine_settings import SETTINGS, EngineSettings, Setting
from twostroke.core.errors import ConfigError

OPTIONS: dict[str, Setting] = {name: setting for name, setting in SETTINGS.items() if setting.option is not None}
"""The fields that have an option."""

FROM_OPTIONS = EngineSettings()
"""Default of the command's parameter that the options replace."""


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, with the engine's options instead of its parameter of type ``EngineSettings``."""
    signature = inspect.signature(command, eval_str=True)
    (place,) = (p.name for p in signature.parameters.values() if p.annotation is EngineSettings)
    options = [_parameter(name, setting) for name, setting in OPTIONS.items()]
    parameters = [q for p in signature.parameters.values() for q in (options if p.name == place else [p])]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        found = {name: given.pop(name) for name in OPTIONS}
        command(**given, **{place: EngineSettings(**{name: _value(name, v) for name, v in found.items()})})

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def words(settings: EngineSettings) -> list[str]:
    """The options that give ``settings``. A field without an option is left at its default."""
    given = ((SETTINGS[name], value) for name, value in settings.changed().items() if name in OPTIONS)
    return [word for setting, v in given for word in _words(setting, v)]


def _words(setting: Setting, value: Any) -> tuple[str, ...]:
    option = str(setting.option)
    return (option,) if setting.switch else (option, str(value if setting.unit == 1 else value / setting.unit))


def _parameter(name: str, setting: Setting) -> inspect.Parameter:
    is_text = setting.choices or setting.is_path
    kind: type = bool if setting.switch else str if is_text else int if setting.unit == 1 else float
    default = getattr(FROM_OPTIONS, name)
    least = 1 if kind is int else None  # a float's bounds depend on its unit: `_value` checks them
    option = typer.Option(default, str(setting.option), help=setting.help, min=least)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=kind)


def _value(name: str, given: Any) -> Any:
    setting = OPTIONS[name]
    if setting.unit == 1 or given is None:
        return given
    if not 0 < given < math.inf:
        raise ConfigError(f"{name}={given:g} must be above 0 and finite.")
    return max(1, int(min(given * setting.unit, setting.most)))
