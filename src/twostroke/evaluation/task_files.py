"""Loads tasks by name, or from a TOML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.core.documents import read_toml
from twostroke.core.errors import ConfigError, CorruptFileError, DataError, did_you_mean
from twostroke.core.paths import home
from twostroke.evaluation.task import TASK_KINDS, Extract, Task

BUILT_IN = Path(__file__).with_name("tasks")
_TEXTS = ("name", "about", "prompt", "delimiter", "shot_separator", "gold", "target")


def task_names() -> list[str]:
    return sorted(file.stem for file in BUILT_IN.glob("*.toml"))


def task_data_folder() -> Path:
    """The folder that holds the data of built-in tasks, unless another one is named."""
    return home() / "eval"


def load_task(name: str, data: Path | None = None) -> Task:
    """The built-in task ``name``, or the task in a TOML file. Its data is in ``data``, by default beside the TOML file.

    Raises ConfigError for an unknown name or a wrong description, DataError if the data is missing.
    """
    file = Path(name)
    if file.suffix != ".toml":
        if name not in task_names():
            near = did_you_mean(name, task_names())
            raise ConfigError(f"task {name!r} is not known. {near} Or give a .toml file that describes one.")
        file = BUILT_IN / f"{name}.toml"
        folder = data or task_data_folder()
    else:
        folder = data or file.parent
    try:
        table = read_toml(file)
    except CorruptFileError as error:
        raise ConfigError(f"task {error}") from None
    return task_of(table, file.stem, folder, str(file))


def task_of(table: Mapping[str, Any], name: str, folder: Path, where: str) -> Task:
    """The task that ``table`` describes by its ``kind`` and the fields of that kind."""
    kind = table.get("kind")
    if kind not in TASK_KINDS:
        raise ConfigError(f"{where}: kind={kind!r} is not a kind of task. Use one of {', '.join(TASK_KINDS)}.")
    task = TASK_KINDS[str(kind)]
    values = {"name": name, **{key: value for key, value in table.items() if key != "kind"}}
    known = {f.name for f in dataclasses.fields(task)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: {key} is not a key of a {kind} task. {did_you_mean(key, known)}")
    for key in ("file", "prompt"):
        if key not in values:
            raise ConfigError(f"{where} lacks {key!r}, which every task needs. Add it.")
    for key, value in values.items():
        values[key] = _checked(key, value, folder, where)
    return task(**values)


def _checked(key: str, value: Any, folder: Path, where: str) -> Any:
    if key in ("file", "shots_file"):
        return _found(_text(key, value, where), folder, where)
    if key in _TEXTS:
        return _text(key, value, where)
    if key in ("shots", "max_tokens"):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{where}: {key}={value!r} must be a whole number.")
        return value
    if key == "extract":
        if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
            raise ConfigError(f"{where}: extract must be tables, as [extract.NAME] with a pattern.")
        for name, own in value.items():
            unknown = set(own) - {"pattern", "which"}
            if unknown or "pattern" not in own:
                raise ConfigError(f"{where}: [extract.{name}] takes a pattern, and which = first or last.")
        return {name: Extract(**own) for name, own in value.items()}
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return tuple(value)
    if key == "stop":
        raise ConfigError(f"{where}: stop={value!r} must be a list of texts.")
    return _text(key, value, where)


def _text(key: str, value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key}={value!r} must be a text.")
    return value


def _found(name: str, folder: Path, where: str) -> Path:
    file = folder / name
    if not file.is_file():
        raise DataError(f"{where} reads {name}, which is not in {folder}. Put it there, or name its folder with --task-data.")
    return file
