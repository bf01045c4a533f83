"""Tables of TOML or JSON as the dataclasses that describe them: the one reader of recipes and of machine profiles."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar

from twostroke.core.documents import MAX_INTEGER, is_integer, is_number
from twostroke.core.errors import ConfigError, did_you_mean

T = TypeVar("T")

_hints = lru_cache(maxsize=64)(typing.get_type_hints)


def build(cls: Callable[..., T], table: dict[str, Any], document: str, where: str = "") -> T:
    """``table`` as the dataclass ``cls``, whose fields are numbers, texts, choices, lists, tables by name or such dataclasses.

    Raises ConfigError for an unknown key and a value of another type, with ``document`` ("recipe") and the key's place in it
    (``where`` names the table's); what ``cls`` itself raises passes.
    """
    kinds = _hints(cls)
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in kinds:
            raise ConfigError(f"{document} key {prefix}{key:.100} is not known. {did_you_mean(key, kinds)}")
    return cls(**{key: _convert(f"{prefix}{key}", value, kinds[key], document) for key, value in table.items()})


def _convert(where: str, value: Any, kind: Any, document: str) -> Any:
    """``value`` as ``kind``, a dataclass field's annotation, or a ConfigError that names ``where``."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(f"{where}={value!r:.100} is not known. Use one of {', '.join(map(repr, choices))}.")
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if value is None else _convert(where, value, inner[0], document)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{where}={value!r:.100} must be a list.")
        return tuple(_convert(f"{where}[{i}]", item, typing.get_args(kind)[0], document) for i, item in enumerate(items))
    if origin is dict or dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table, found {value!r:.100}.")
        if origin is dict:
            return {k: _convert(f"{where}.{k}", item, typing.get_args(kind)[1], document) for k, item in value.items()}
        return build(kind, value, document, where)
    if kind is float and isinstance(value, int) and is_number(value):
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and not is_integer(value):
        raise ConfigError(f"{where}={value!r:.100} must be at most {MAX_INTEGER}.")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where}={value!r:.100} must be of type {kind.__name__}.")
    return value
