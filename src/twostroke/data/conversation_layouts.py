"""Turns records of the usual instruction data sets into one kind of conversation: a list of messages with role and text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.core.errors import DataError

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """``messages`` are {"role", "content"} in order; ``tools`` are the functions that the assistant may call, as JSON."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] = ()

    @property
    def has_answer(self) -> bool:
        """Whether a message of the assistant has text."""
        return any(m["role"] == "assistant" and m["content"].strip() for m in self.messages)


def read_conversation(record: Mapping[str, Any], layout: str, where: str) -> Conversation:
    """The conversation in ``record`` of ``layout``. DataError names ``where``, the key and the likely layout."""
    return _READERS[layout](record, where)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(record: Mapping[str, Any], key: str, where: str, layout: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise DataError(f"{where} has no text under {key!r}, which the layout {layout!r} needs. {_looks_like(record)}")
    return value


def _looks_like(record: Mapping[str, Any]) -> str:
    """The last sentence of an error: the layout whose keys the record has, or the record's keys."""
    for layout, keys in _KEYS.items():
        if all(key in record for key in keys):
            return f'It looks like data.layout="{layout}".'
    return f"Keys there: {', '.join(map(repr, sorted(record)[:8])) or 'none'}."


def _entries(record: Mapping[str, Any], key: str, where: str, layout: str) -> Sequence[Mapping[str, Any]]:
    entries = record.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(
            f"{where} has no list of objects under {key!r}, which the layout {layout!r} needs. {_looks_like(record)}"
        )
    return entries


def _tools(record: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """Tools as a list, or as JSON text of a list, as data sets of tool calls hold them. Empty text stands for no tools."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise DataError(f"{where} has text under 'tools' that is not valid JSON. It must be a list.") from None
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise DataError(f"{where} has {type(tools).__name__} under 'tools', which must be a list.")
    return tuple(tools)


def _content(value: Any, where: str) -> str:
    """A text, or the joined texts of a list of parts in OpenAI's layout."""
    if value is None:
        return ""  # a message of the assistant that only calls tools
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    raise DataError(
        f"{where}: a message's content must be text, and it is {json.dumps(value)[:80]}. Images and sound are not supported."
    )


def _messages(record: Mapping[str, Any], where: str) -> Conversation:
    messages: list[Mapping[str, Any]] = []
    for entry in _entries(record, "messages", where, "messages"):
        role = entry.get("role")
        if role not in ROLES:
            raise DataError(f"{where}: role {role!r} is not known. Use one of {', '.join(ROLES)}.")
        # Other keys (tool_calls, name, …) stay, because templates read them.
        messages.append({**entry, "role": role, "content": _content(entry.get("content"), where)})
    return Conversation(tuple(messages), _tools(record, where))


def _alpaca(record: Mapping[str, Any], where: str) -> Conversation:
    """``instruction`` and ``input`` are one question, and ``output`` is its answer. ``system`` and ``history`` stand before."""
    messages = []
    system = _text(record, "system", where, "alpaca", default="")
    if system:
        messages.append(_message("system", system))
    for pair in record.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{where}: 'history' must be a list of [question, answer], found {json.dumps(pair)[:80]}.")
        messages += [_message("user", pair[0]), _message("assistant", pair[1])]
    instruction = _text(record, "instruction", where, "alpaca")
    given = _text(record, "input", where, "alpaca", default="")
    messages.append(_message("user", f"{instruction}\n\n{given}" if given.strip() else instruction))
    messages.append(_message("assistant", _text(record, "output", where, "alpaca")))
    return Conversation(tuple(messages))


def _sharegpt(record: Mapping[str, Any], where: str) -> Conversation:
    """``conversations`` are a list of ``from`` and ``value``. The assistant sends a ``function_call``, and the tool answers
    with an ``observation``."""
    messages = []
    system = _text(record, "system", where, "sharegpt", default="")
    if system:
        messages.append(_message("system", system))
    for entry in _entries(record, "conversations", where, "sharegpt"):
        role = _SHAREGPT_ROLES.get(str(entry.get("from")))
        if role is None:
            raise DataError(f"{where}: from={entry.get('from')!r} is not known. Use one of {', '.join(_SHAREGPT_ROLES)}.")
        messages.append(_message(role, _text(entry, "value", where, "sharegpt")))
    return Conversation(tuple(messages), _tools(record, where))


def _prompt(record: Mapping[str, Any], where: str) -> Conversation:
    """``prompt`` is the question, and ``response`` or ``completion`` its answer."""
    answer = "completion" if "completion" in record and "response" not in record else "response"
    return Conversation(
        (
            _message("user", _text(record, "prompt", where, "prompt")),
            _message("assistant", _text(record, answer, where, "prompt")),
        )
    )


_READERS: dict[str, Callable[[Mapping[str, Any], str], Conversation]] = {
    "messages": _messages,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "prompt": _prompt,
}
LAYOUT_KEYS = {
    "messages": ("messages", "tools"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "sharegpt": ("conversations", "system", "tools"),
    "prompt": ("prompt", "response", "completion"),
}
"""The keys that each layout reads."""

_KEYS = {
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "prompt": ("prompt",),
}
