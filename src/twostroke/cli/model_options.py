"""The options of ``serve`` that name several models: ``--model NAME=DIR``, their memory, and an A/B test of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from twostroke.cli.opened_model import opened_model
from twostroke.core.adapter_names import adapters_of, check_adapter_name
from twostroke.core.errors import ConfigError
from twostroke.core.policy import CACHE_SHARE

if TYPE_CHECKING:
    from twostroke.core.engine_settings import EngineSettings
    from twostroke.server.launch import ServeSettings

MODEL = typer.Option(
    [], "--model", help="Another model that is served, as NAME=DIR: loaded when a request names it. Repeatable."
)
MEMORY = typer.Option(
    0.0, "--models-memory-gib", help="With --model: memory of all loaded models; the least recently used make room."
)
WAIT = typer.Option(60.0, "--model-wait-s", min=0.1, help="With --model: longest time that a request waits for a load.")
AB = typer.Option(
    "", "--ab", metavar="NAME=SHARE", help="A/B test: a share of MODEL's clients, from 0 to 1, is answered by the model NAME."
)
MOST_GIB = 2**20


class Several(NamedTuple):
    """What the options say. ``of_model``: adapters by the model that they belong to, which is "" for the first."""

    directories: Mapping[str, Path]
    most_bytes: float
    wait_s: float
    split: tuple[str, float] | None
    of_model: Mapping[str, Mapping[str, Path]]


def several(
    model: Sequence[str], memory_gib: float, wait_s: float, ab: str, lora: Sequence[str], names: Sequence[str]
) -> Several:
    """Raises ConfigError for options that are not so, or that do not go together. ``names`` are the first model's."""
    directories: dict[str, Path] = {}
    for option in model:
        name, _, directory = option.partition("=")
        if not directory:
            raise ConfigError(f"--model {option!r:.200} must be NAME=DIR.")
        check_adapter_name(name, "--model")
        if name in directories or name in names:
            raise ConfigError(f"--model names {name!r} twice, or as the first model is called. Give each model its own name.")
        directories[name] = opened_model(Path(directory))
    if bool(directories) != bool(memory_gib):
        raise ConfigError("--model and --models-memory-gib go together: the memory that loaded models may take. Give both.")
    if directories and not 0 < memory_gib <= MOST_GIB:
        raise ConfigError(f"--models-memory-gib={memory_gib:g} must be above 0 and at most {MOST_GIB}.")
    of_model: dict[str, dict[str, Path]] = {}
    for option in lora:
        name, separator, directory = option.partition("=")
        adapter, _, owner = name.partition("@") if directories else (name, "", "")
        if owner in names:
            owner = ""
        if owner and owner not in directories:
            raise ConfigError(f"--lora {option!r:.200}: model {owner!r} is not served. Use one of {', '.join(directories)}.")
        own = adapters_of([f"{adapter}{separator}{directory}"])
        taken = {*names, *directories, *(other for found in of_model.values() for other in found)}
        if twice := sorted(own.keys() & taken):
            raise ConfigError(
                f"--lora names an adapter {twice[0]!r}, as a model or another adapter is called. Take another name."
            )
        of_model.setdefault(owner, {}).update(own)
    return Several(directories, memory_gib * 2**30, wait_s, _split(ab, directories), of_model)


def _split(ab: str, directories: Mapping[str, Path]) -> tuple[str, float] | None:
    if not ab:
        return None
    name, _, given = ab.rpartition("=")
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not name or not 0 < share < 1:
        raise ConfigError(f"--ab={ab!r:.200} must be NAME=SHARE, with a share above 0 and below 1.")
    if name not in directories:
        raise ConfigError(f"--ab={ab!r:.200}: model {name!r} is not served. Add --model {name}=DIR and --models-memory-gib.")
    return name, share


def with_others(settings: ServeSettings, asked: Several) -> ServeSettings:
    """``settings``, the first model's, with the other models. Each cache that is not set by hand is its model's part of a
    quarter of what the memory leaves beside weights and process, as one engine takes a quarter of the free memory. Raises
    ConfigError."""
    from twostroke.core.families import read_spec
    from twostroke.server.launch import PoolSettings

    n = 1 + len(asked.directories)
    first = replace(settings, engine=_engine(settings.engine, settings.directory, settings.names[0], asked, n))
    others = []
    for name, directory in asked.directories.items():
        read_spec(directory).require_buildable()
        adapters = {adapter: str(path.resolve()) for adapter, path in asked.of_model.get(name, {}).items()}
        engine = _engine(settings.engine, directory, name, asked, n)
        others.append(replace(settings, directory=directory, names=(name,), adapters=adapters, engine=engine))
    return replace(first, pool=PoolSettings(tuple(others), asked.most_bytes, asked.wait_s, asked.split))


def _engine(engine: EngineSettings, directory: Path, name: str, asked: Several, n: int) -> EngineSettings:
    from twostroke.core.families import read_spec
    from twostroke.server.model_memory import fixed_bytes

    if engine.kv_dir is not None:  # a store has one owner
        engine = replace(engine, kv_dir=str(Path(engine.kv_dir) / f"model-{name.replace('/', '-')}"))
    if engine.kv_cache_bytes is not None:
        return engine
    left = asked.most_bytes - fixed_bytes(directory, read_spec(directory), engine)
    if left <= 0:
        raise ConfigError(
            f"--models-memory-gib={asked.most_bytes / 2**30:g} does not hold model {name!r}, whose weights and process take "
            f"{(asked.most_bytes - left) / 2**30:.3g} GiB. Raise it."
        )
    return replace(engine, kv_cache_bytes=max(1, int(CACHE_SHARE * left / n)))
