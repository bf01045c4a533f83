"""What an application on Ray Serve is made of: mistakes are told before Ray starts, by the name that the operator gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.server.launch import CaptureSettings, KVEventSettings, ServeSettings
from twostroke.server.ray_serve.settings import Arguments, Scale, check_replicated

PLAIN = ServeSettings(Path("m"), EngineSettings(), ("m",))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"files_dir": Path("f")}, "--files-dir"),
        ({"capture": CaptureSettings(Path("c"), 1)}, "--capture"),
        ({"response_cache": Path("r")}, "--response-cache"),
        ({"usage_log": Path("u")}, "--usage-log"),
        ({"admin": True}, "--admin"),
        ({"kv_events": KVEventSettings(None)}, "--kv-events"),
        ({"log_requests": True}, "--log-json"),
        ({"engine": EngineSettings(kv_dir="k")}, "--kv-dir"),
    ],
)
def test_an_option_that_replicas_cannot_keep_is_refused_by_its_name(changes: dict[str, Any], option: str) -> None:
    check_replicated(PLAIN, Scale())
    with pytest.raises(ConfigError, match=f"^{option} does not go with --ray"):
        check_replicated(replace(PLAIN, **changes), Scale())


def test_a_limit_that_each_replica_would_count_by_itself_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one name=ann\nsk-two requests_per_minute=5\n")
    limited = replace(PLAIN, api_key_file=keys)
    check_replicated(limited, Scale(max_replicas=1))
    with pytest.raises(ConfigError, match="requests_per_minute"):
        check_replicated(limited, Scale(max_replicas=2))
    keys.write_text("sk-one name=ann capture=yes\n")
    check_replicated(limited, Scale(max_replicas=2))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas=3 must be from 0"),
        ({"min_replicas": -1}, "min_replicas=-1"),
        ({"target_wait_s": 0.0}, "target_wait_s=0 must be above 0"),
        ({"target_ongoing": float("nan")}, "target_ongoing=nan"),
        ({"scale_down_s": -1.0}, "scale_down_s=-1"),
    ],
)
def test_impossible_scales_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Scale(**given)


def test_arguments_of_a_serve_configuration_become_the_command_lines_settings(echo_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    given = {"model": str(echo_model), "served_names": ["m"], "grace_s": 5, "scale": {"min_replicas": 0, "max_replicas": 3}}
    settings, scale = Arguments.read(given | {"api_key_file": str(keys), "engine": {"max_running": 4}}).settings()
    assert (settings.names, settings.grace_s, settings.engine.max_running) == (("m",), 5.0, 4)
    assert settings.engine.separate_prefixes
    assert (scale.min_replicas, scale.max_replicas) == (0, 3)
    open_to_all, _ = Arguments.read({"model": str(echo_model), "without_key": True}).settings()
    assert open_to_all.names == (echo_model.name,)
    assert not open_to_all.engine.separate_prefixes


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "argument model is missing"),
        ({"model": "m", "modle": 1}, "argument key modle is not known"),
        ({"model": "m", "scale": {"max": 1}}, "argument key scale.max is not known"),
        ({"model": "m", "engine": {"dtype": 8}}, "engine.dtype=8 must be of type str"),
        ({"model": "m"}, "there is no api_key_file"),
    ],
)
def test_arguments_that_are_wrong_are_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Arguments.read(given).settings()
