"""Objects as plain data, and what their types say of each key: JSON documents are made of the one, their schema of the other.

A document of a class has a key for each field; where fields are ``Annotated``, for each of those alone. A property, or a method
without arguments, whose return type is ``Annotated`` is a key too, and stands in the place of a field of its name. A class
attribute ``DOCUMENT`` names the keys in their order where it is another. The texts of an annotation are the key's unit, where
there are two, and its meaning; ``docs/plan_schema.py`` makes schema and page of them.

Annotations are text until a document or the schema is asked for (``from __future__ import annotations``), so that describing a
class costs nothing at start-up.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any, NamedTuple


class As(NamedTuple):
    """In an annotation: the key's name where it is another than the field's."""

    name: str


class LeftOut:
    """In an annotation: the key is absent where its value is None."""


class Key(NamedTuple):
    """One key of a document. ``shape`` is what its value is: the type, or what the annotation names instead."""

    name: str
    attribute: str
    shape: Any
    unit: str
    meaning: str
    left_out: bool
    called: bool


@lru_cache(maxsize=256)
def keys_of(cls: type) -> tuple[Key, ...]:
    """The keys of a document of ``cls``: a dataclass, a named tuple, or a class that does nothing but describe a table. Raises
    TypeError for one without keys, and where ``DOCUMENT`` names other keys."""
    annotations = {name: raw for base in reversed(cls.__mro__) for name, raw in vars(base).get("__annotations__", {}).items()}
    names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else list(annotations)
    if not names:
        raise TypeError(f"{cls.__name__} describes no key. Annotate its fields.")
    namespace = vars(sys.modules[cls.__module__])
    described = [name for name in names if _is_described(annotations.get(name))]
    keys = [_key(name, annotations.get(name), namespace) for name in described or names]
    for name, member in {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}.items():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, types.FunctionType) and _is_described(function.__annotations__.get("return")):
            called = not isinstance(member, property)
            keys.append(_key(name, function.__annotations__["return"], function.__globals__)._replace(called=called))
    by_name = {key.name: key for key in keys}
    order = getattr(cls, "DOCUMENT", " ".join(by_name)).split()
    if sorted(order) != sorted(by_name):
        odd = ", ".join(sorted(set(order) ^ set(by_name))) or "a key that it names twice"
        raise TypeError(f"{cls.__name__}.DOCUMENT must name each key once; it differs in {odd}.")
    return tuple(by_name[name] for name in order)


def _is_described(raw: Any) -> bool:
    return "Annotated[" in str(getattr(raw, "__forward_arg__", raw))


def _key(name: str, raw: Any, namespace: dict[str, Any]) -> Key:
    """A key from its annotation, which is evaluated only where it says more than the type."""
    if not _is_described(raw):
        return Key(name, name, raw, "", "", False, False)
    text = getattr(raw, "__forward_arg__", raw)
    hint = eval(text, namespace) if isinstance(text, str) else text
    shape, *notes = typing.get_args(hint)
    texts = [note for note in notes if isinstance(note, str)]
    shown = next((note.name for note in notes if isinstance(note, As)), name)
    others = [note for note in notes if not isinstance(note, str | As) and note is not LeftOut]
    return Key(
        shown, name, others[0] if others else shape, texts[0] if len(texts) > 1 else "", texts[-1], LeftOut in notes, False
    )


def plain(value: Any) -> Any:
    """``value`` as JSON has it: an object by ``keys_of``, a tuple as a list, a number that is not finite as None."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        document = {}
        for key in keys_of(type(value)):  # type: ignore[arg-type]
            found = getattr(value, key.attribute)
            if key.called:
                found = found()
            if found is not None or not key.left_out:
                document[key.name] = plain(found)
        return document
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value
