"""Renders chat messages as the text that a model was trained on, by the model's own Jinja template or a plain default."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from twostroke.core.documents import read_object
from twostroke.core.errors import CorruptFileError, InputError
from twostroke.data.sandbox import TEXT, Sandbox
from twostroke.data.template_sandbox import COMPILE_S, RENDER_S

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models without a template, mostly base models: a line ``User: …`` for each message, then ``Assistant:`` to continue."""

MAX_TEMPLATE_CHARACTERS = 2**20
MAX_CONFIG_BYTES = 16 * 2**20
_MODULE = "twostroke.data.template_sandbox"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A template (``DEFAULT_TEMPLATE`` for None), compiled once in a process of its own (``data.template_sandbox``).

    ``start`` starts the process without waiting for it; otherwise the first ``render`` does. The process ends with ``close``,
    with this object, and with this process even if that is killed. A process that takes over 2 s or 256 MiB for a text is
    replaced. Several threads may share a template; texts are rendered one at a time.
    """

    def __init__(self, source: str | None) -> None:
        self._source = DEFAULT_TEMPLATE if source is None else source
        self._lock = threading.Lock()
        self._process: Sandbox | None = None
        self._broken = ""
        if len(self._source) > MAX_TEMPLATE_CHARACTERS:
            self._broken = f"the chat template has {len(self._source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are read."

    def start(self) -> None:
        with self._lock:
            if self._process is None and not self._broken:
                self._process = Sandbox(_MODULE)

    def close(self) -> None:
        with self._lock:
            self._end()

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of ``messages``, the same as from transformers' ``apply_chat_template``.

        ``variables`` are what templates expect beside the messages: ``bos_token``, ``eos_token``, ``tools`` and the like.
        Raises InputError if the template is broken, refuses the messages, or takes too much time or memory for them.
        """
        asked = {"messages": list(messages), "add_generation_prompt": add_generation_prompt} | variables
        try:
            frame = json.dumps(asked).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages cannot be handed to the chat template: {error}.") from None
        with self._lock:
            if self._broken:
                raise InputError(self._broken)
            if self._process is None:
                self._process = Sandbox(_MODULE)
            if not self._process.ready:
                kind, text = self._ask(self._source.encode("utf-8", "surrogatepass"), COMPILE_S)
                if kind != TEXT:
                    self._broken = f"the model's chat template cannot be used: {text}."  # compiling it again would fail again
                    raise InputError(self._broken)
            kind, text = self._ask(frame, RENDER_S)
        if kind != TEXT:
            raise InputError(f"the chat template does not take these messages: {text}.")
        return text

    def _ask(self, frame: bytes, limit_s: float) -> tuple[bytes, str]:
        assert self._process is not None
        try:
            return self._process.ask(frame, limit_s)
        finally:
            if not self._process.alive:
                self._process = None

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


@lru_cache(maxsize=4)
def _template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """``ChatTemplate(template).render(…)``. The last four templates stay compiled. Raises InputError."""
    return _template(template).render(messages, add_generation_prompt, **variables)


def read_chat_template(directory: Path) -> tuple[str | None, dict[str, Any]]:
    """The template (``chat_template.jinja``, else ``tokenizer_config.json``) and the special tokens that it may use.

    The template is None if the model comes without one. Raises CorruptFileError if a file cannot be read.
    """
    variables: dict[str, Any] = {}
    template: str | None = None
    config_file, template_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    if config_file.is_file():
        config = read_object(config_file)
        for name in _SPECIAL_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token
        found = config.get("chat_template")
        if isinstance(found, list):  # several named templates: "default" is the one for plain chats
            found = next((e.get("template") for e in found if isinstance(e, dict) and e.get("name") == "default"), None)
        template = found if isinstance(found, str) else None
    if template_file.is_file():
        template = read_template_file(template_file)
    return template, variables


def read_template_file(file: Path) -> str:
    """The text of a template file. Raises CorruptFileError."""
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise CorruptFileError(f"{file} is over {MAX_CONFIG_BYTES} bytes, the most that is read.")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{file} cannot be read as UTF-8 text ({type(error).__name__}). Save it as UTF-8.") from None
