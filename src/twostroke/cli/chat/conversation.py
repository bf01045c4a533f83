"""A conversation: its messages, its system prompt, the settings of its answers, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke.core.aside import write_text
from twostroke.core.errors import InputError, did_you_mean
from twostroke.scheduling.sampling_params import SamplingParams

Message = dict[str, str]
"""``role`` and ``content``, as chat templates and servers take them."""

SETTABLE: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}
"""Settings of an answer that may be changed, with the type of their values. Their names are those of ``SamplingParams``."""

DEFAULT = "default"

NEXT_SPEAKER = "\nUser:"
"""Where an answer ends by a model without a chat template, which writes the whole conversation on (``DEFAULT_TEMPLATE``)."""

_CONTROLS = {i: "\ufffd" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def harmless(text: str) -> str:
    """``text`` without characters that a terminal obeys: what a model or a server writes must not move the cursor, change the
    title or type for the user."""
    return text.translate(_CONTROLS)


@dataclass
class Answer:
    """One answer as far as it has come. ``finish_reason`` is None until the model ends it. ``is_full``: the context has no room
    for more. ``reasons``: its reasoning has begun and its text has not. Seconds count from when it was asked for."""

    text: str = ""
    finish_reason: str | None = None
    output_tokens: int = 0
    ttft_s: float | None = None
    elapsed_s: float = 0.0
    is_full: bool = False
    reasons: bool = False


@dataclass
class Conversation:
    """``settings`` has what was set; other settings are left to the engine or to the server."""

    system: str = ""
    settings: dict[str, int | float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def with_message(self, text: str) -> list[Message]:
        """All messages that the answer to ``text`` follows from. Raises InputError for text that no encoding has."""
        try:
            (self.system + text).encode()
        except UnicodeEncodeError:
            raise InputError("the message holds half of a surrogate pair, which is not a character.") from None
        return [*self.with_system(), {"role": "user", "content": text}]

    def with_system(self) -> list[Message]:
        """The system prompt, if there is one, and all messages."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def set(self, name: str, word: str) -> None:
        """Set ``name`` to the value that ``word`` writes; ``default`` unsets it. Raises InputError."""
        kind = SETTABLE.get(name)
        if kind is None:
            raise InputError(f"{name!r:.60} cannot be set. {did_you_mean(name[:60], SETTABLE)}")
        if word == DEFAULT:
            self.settings.pop(name, None)
            return
        try:
            value = kind(word)
        except ValueError:
            raise InputError(f"{name}={word!r:.60} must be a {'whole number' if kind is int else 'number'}.") from None
        given: dict[str, Any] = {name: value}
        SamplingParams(**given)  # raises for a value out of range
        self.settings[name] = value

    def save(self, path: Path) -> None:
        """Write one line, ``{"messages": […]}``, which a recipe's layout ``messages`` reads. Raises InputError."""
        if not self.messages:
            raise InputError("nothing was said yet, so there is nothing to save.")
        if path.exists():
            raise InputError(f"{path} exists. Name a new file.")
        try:
            write_text(path, json.dumps({"messages": self.with_system()}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}. Name another file.") from None
