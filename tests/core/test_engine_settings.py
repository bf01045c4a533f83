"""The engine's settings say what they refuse, and travel to the engine process as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twostroke.core.engine_settings import SETTINGS, EngineSettings, engine_settings
from twostroke.core.errors import ConfigError
from twostroke.server.launch import ServeSettings


@pytest.mark.parametrize(
    "settings",
    [EngineSettings(), EngineSettings("int8", max_model_len=64, n_threads=2, separate_prefixes=True, kv_dtype="fp32")],
)
def test_the_engine_process_is_told_the_settings_as_they_are(settings: EngineSettings) -> None:
    assert engine_settings(settings.to_json()) == settings
    command = ServeSettings(Path("m"), settings, ("m",)).engine_command()
    assert engine_settings(command[command.index("--settings") + 1]) == replace(settings, in_server=True)


def test_only_what_was_changed_is_told() -> None:
    assert EngineSettings().changed() == {}
    assert EngineSettings(max_running=3, dtype="auto").changed() == {"max_running": 3}


@pytest.mark.parametrize("ratio", ["1", "1.0", "0.5", "-2", "nan", "2x", ""])
def test_a_step_ratio_that_leaves_no_room_or_is_no_number_is_refused(ratio: object) -> None:
    with pytest.raises(ConfigError, match="max_step_ratio"):
        EngineSettings(max_step_ratio=ratio)  # type: ignore[arg-type]
    assert EngineSettings(max_step_ratio="1.25").changed() == {"max_step_ratio": "1.25"}


def test_unknown_settings_and_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="engine settings key max_runing is not known"):
        engine_settings('{"max_runing": 3}')
    with pytest.raises(ConfigError, match="max_running='3' must be of type int"):
        engine_settings('{"max_running": "3"}')


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_refuses_what_it_cannot_be(name: str) -> None:
    value = "fp5" if SETTINGS[name].choices else 0
    refused = "is not known|must be a whole number|must be true or false|must be the path"
    with pytest.raises(ConfigError, match=f"{name}={value!r} ({refused})"):
        EngineSettings(**{name: value})
