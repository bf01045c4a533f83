"""What the application on Ray Serve is made of, and how many replicas there may be. Imports no Ray, so that mistakes are told
before Ray starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from twostroke.core.adapter_names import adapters_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.paths import model_directory
from twostroke.core.tables import build
from twostroke.server.keys import KeyLimits, read_key_lines
from twostroke.server.launch import ServeSettings


@dataclass(frozen=True)
class Scale:
    """From ``min_replicas`` (0: none while nobody asks) to ``max_replicas``, each with ``replica_cpus`` processors. More are
    started for more than ``target_ongoing`` requests each, or a predicted wait above ``target_wait_s``. They end when fewer
    have been enough for ``scale_down_s``. Raises ConfigError."""

    min_replicas: int = 1
    max_replicas: int = 1
    replica_cpus: int = 1
    target_ongoing: float = 16.0
    target_wait_s: float = 1.0
    scale_down_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"min_replicas={self.min_replicas} must be from 0 to the most replicas, {self.max_replicas}. Lower it, or "
                "raise the most (--replicas)."
            )
        for name in ("max_replicas", "replica_cpus", "target_ongoing", "target_wait_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name):g} must be above 0.")
        if not self.scale_down_s >= 0:
            raise ConfigError(f"scale_down_s={self.scale_down_s:g} must not be below 0.")


@dataclass(frozen=True)
class Arguments:
    """What `ray_app.app` takes from a Serve configuration. All but ``scale`` is as on ``twostroke serve``'s command line."""

    model: str
    served_names: tuple[str, ...] = ()
    api_key_file: str | None = None
    without_key: bool = False
    share_prefixes: bool = False
    lora: tuple[str, ...] = ()
    max_concurrent: int = 128
    max_queued_tokens: int | None = None
    grace_s: float = ServeSettings.grace_s
    scale: Scale = Scale()
    engine: EngineSettings = field(default_factory=EngineSettings)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Arguments:
        """Raises ConfigError for an unknown name or a value of another type."""
        if "model" not in given:
            raise ConfigError("argument model is missing. Name a model's directory.")
        return build(cls, dict(given), "argument")

    def settings(self) -> tuple[ServeSettings, Scale]:
        """A cluster's proxies listen for other machines, so there must be ``api_key_file``, or ``without_key``. Raises
        ConfigError."""
        if self.api_key_file is None and not self.without_key:
            raise ConfigError("a cluster lets other machines in, and there is no api_key_file. Give one, or without_key: true.")
        directory = model_directory(Path(self.model))
        separate = self.api_key_file is not None and not self.share_prefixes
        settings = ServeSettings(
            directory,
            replace(self.engine, separate_prefixes=separate),
            self.served_names or (directory.resolve().name,),
            None if self.api_key_file is None else Path(self.api_key_file),
            self.max_concurrent,
            self.grace_s,
            {name: str(path.resolve()) for name, path in adapters_of(self.lora).items()},
            max_queued_tokens=self.max_queued_tokens,
        )
        return settings, self.scale


def check_replicated(settings: ServeSettings, scale: Scale) -> None:
    """Raises ConfigError for what several replicas, which come and go, cannot keep."""
    single = {
        "--files-dir": (settings.files_dir, "one server uses the directory of files and batches"),
        "--capture": (settings.capture, "one server writes the folder of captured chats"),
        "--response-cache": (settings.response_cache, "one server uses the directory of answers"),
        "--usage-log": (settings.usage_log, "one server appends to the usage log"),
        "--kv-dir": (settings.engine.kv_dir, "one engine uses the directory of cached prefixes"),
        "--kv-events": (settings.kv_events, "its events are of one server's caches, at one address"),
        "--log-json": (settings.log_requests or None, "Ray Serve keeps the replicas' logs, in its own form"),
        "--admin": (settings.admin or None, "its routes change one server, and replicas that start later would not follow"),
    }
    for option, (value, why) in single.items():
        if value is not None:
            raise ConfigError(f"{option} does not go with --ray: {why}. Leave out one of them.")
    if settings.api_key_file is not None and scale.max_replicas > 1:
        for line in read_key_lines(settings.api_key_file):
            limit = next((each.name for each in fields(KeyLimits) if getattr(line.limits, each.name) is not None), None)
            if limit is not None:
                raise ConfigError(
                    f"{settings.api_key_file} limits a key by {limit}, which each of {scale.max_replicas} replicas would count "
                    "by itself. Leave the limit out, or serve with --replicas 1."
                )
