"""Reads the tool calls out of an answer's text as it comes, in the forms in which models write them."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, field

ID_CHARACTERS = 9
"""Of a call's id, letters and digits: what Mistral's templates take."""

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: each a JSON object with a ``name`` and ``arguments`` (the key of that name), each between
    ``before`` and ``after``, or all in one list behind ``before``; with neither, as the whole answer, with ``between`` between
    them. Templates that teach it hold ``sign``."""

    name: str
    sign: str
    before: str
    after: str = ""
    arguments: str = "arguments"
    in_list: bool = False
    between: str = ""
    optional: str = ""
    """What may stand before the whole answer."""


FORMATS = (
    CallFormat("hermes", "<tool_call>", "<tool_call>", "</tool_call>"),
    CallFormat("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", in_list=True),
    CallFormat("llama", "<|python_tag|>", "", arguments="parameters", between=";", optional="<|python_tag|>"),
)
"""Hermes and Qwen; Mistral; Llama 3."""


def format_of(template: str | None) -> CallFormat | None:
    """The format that a chat template teaches its model; None if it shows it no tools, or teaches another."""
    if template is None or "tools" not in template:
        return None
    return next((row for row in FORMATS if row.sign in template), None)


@dataclass
class CallDelta:
    """What the ``index``-th call gained: at its beginning its ``id`` and ``name``, and text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Found:
    """What an answer gained, in its order: text beside calls, and calls."""

    pieces: list[str | CallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]

    def say(self, text: str) -> None:
        if text:
            self.pieces.append(text)

    def _of(self, index: int) -> CallDelta:
        last = self.pieces[-1] if self.pieces else None
        if not isinstance(last, CallDelta) or last.index != index:
            last = CallDelta(index)
            self.pieces.append(last)
        return last

    def begin(self, index: int, name: str) -> None:
        call = self._of(index)
        call.id, call.name = new_id(), name

    def argue(self, index: int, text: str) -> None:
        self._of(index).arguments += text


def new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARACTERS))


class CallReader:
    """``add`` takes text and returns what is certain by now; ``finish`` returns the rest. However the text is cut into pieces,
    the results make up the same calls and the same content.

    A call is certain once its name has come and its arguments begin. Its arguments are passed on as they are written. Text that
    begins like a call and does not go on like one is content. White space around calls belongs to neither.
    """

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self.n_calls = 0
        self._held = ""  # text that may yet be part of calls
        self._again = ""  # text that was held and is to be read as what is beside calls
        self._in_list = False
        self._object: _Object | None = None
        self._read = self._start if not form.before else self._text

    def add(self, text: str) -> Found:
        found = Found()
        at = 0
        while at < len(text):
            if self._read == self._rest or (self._read == self._text and not self._held and self._plain(text, at)):
                found.say(text[at:])
                break
            self._read(text[at], found)
            at += 1
            if self._again:
                text, at, self._again = self._again + text[at:], 0, ""
        return found

    def finish(self) -> Found:
        """What was held back at the end: of calls that were cut off there is no more."""
        found = Found()
        if self._object is not None and self._object.begun:
            return found
        if self._held.strip(_SPACE) or not self.n_calls:
            found.say(self._held)
        self._held = ""
        return found

    def _plain(self, text: str, first: int) -> bool:
        """Whether nothing of ``text`` from there on can begin a call, and no white space at its end may stand before one."""
        return self._form.before[0] not in text[first:] and text[-1] not in _SPACE

    def _text(self, character: str, found: Found) -> None:
        """Beside calls, where ``before`` may begin."""
        self._held += character
        before = self._form.before
        if self._held.endswith(before):
            kept = len(self._held[: -len(before)].rstrip(_SPACE))
            found.say(self._held[:kept])
            self._held, self._read = self._held[kept:], self._open
            return
        n = next(n for n in range(min(len(before), len(self._held)), -1, -1) if self._held.endswith(before[:n]))
        kept = len(self._held) - n
        kept = len(self._held[:kept].rstrip(_SPACE))
        found.say(self._held[:kept])
        self._held = self._held[kept:]

    def _start(self, character: str, found: Found) -> None:
        """At the beginning of an answer that is calls as a whole, or none."""
        self._held += character
        written = self._held.lstrip(_SPACE)
        optional = self._form.optional
        if written.startswith(optional):
            written = written[len(optional) :].lstrip(_SPACE)
        elif optional.startswith(written):
            return
        if not written:
            return
        if written == "{":
            self._begin("{", found)
        else:
            self._give_up(found)

    def _open(self, character: str, found: Found) -> None:
        """Behind ``before``, or between the calls of a list."""
        self._held += character
        if character == "{" and (not self._form.in_list or self._in_list):
            self._begin(character, found)
        elif character == "[" and self._form.in_list and not self._in_list:
            self._in_list = True
        elif character not in _SPACE:
            self._give_up(found)

    def _begin(self, character: str, found: Found) -> None:
        self._object = _Object(self._form, self.n_calls)
        self._read = self._inside
        self._object.add(character, found)

    def _inside(self, character: str, found: Found) -> None:
        assert self._object is not None
        self._held += character
        state = self._object.add(character, found)
        if self._object.begun:
            self._held = character if state == _BROKEN else ""
            self.n_calls = self._object.index + 1
        if state == _ENDED and self._object.begun:
            self._object, self._read = None, self._behind
        elif state != _INSIDE:
            self._give_up(found)

    def _behind(self, character: str, found: Found) -> None:
        """Behind a call."""
        form = self._form
        self._held += character
        written = self._held.strip(_SPACE)
        if not written:
            return
        if form.in_list and written in ("]", ","):
            self._held, self._read = "", self._open if written == "," else self._text
            self._in_list = written == ","
        elif form.between and written == form.between:
            self._held, self._read = "", self._open
        elif form.after and form.after.startswith(self._held.lstrip(_SPACE)):
            if written == form.after:
                self._held, self._read = "", self._text
        else:
            self._give_up(found)

    def _rest(self, character: str, found: Found) -> None:
        found.say(character)

    def _give_up(self, found: Found) -> None:
        """What was held is content, and so is what follows, up to the next ``before``."""
        self._object, self._in_list = None, False
        held, self._held = self._held, ""
        if self._form.before:
            self._read = self._text
            first = 1 + len(held) - len(held.lstrip(_SPACE))
            found.say(held[:first])
            self._again = held[first:]  # it may hold the beginning of a call
        else:
            self._read = self._rest
            found.say(held)


_INSIDE, _ENDED, _BROKEN = "inside", "ended", "broken"


class _Object:
    """One call's JSON object, character by character from its brace on. ``begun``: it is a call."""

    def __init__(self, form: CallFormat, index: int) -> None:
        self.index = index
        self.begun = False
        self._form = form
        self._read = self._brace
        self._key = ""
        self._raw: list[str] = []  # of the text or number under way
        self._escaped = False
        self._quoted = False
        self._depth = 0
        self._name: str | None = None
        self._waiting: str | None = None  # arguments that came before the name
        self._argued = False

    def add(self, character: str, found: Found) -> str:
        return self._read(character, found)

    def _brace(self, character: str, found: Found) -> str:
        self._read = self._first_key
        return _INSIDE

    def _first_key(self, character: str, found: Found) -> str:
        return self._end(found) if character == "}" else self._before_key(character, found)

    def _before_key(self, character: str, found: Found) -> str:
        if character in _SPACE:
            return _INSIDE
        if character != '"':
            return _BROKEN
        self._raw, self._read = ['"'], self._in_key
        return _INSIDE

    def _in_key(self, character: str, found: Found) -> str:
        if self._goes_on(character):
            return _INSIDE
        text = self._text()
        if text is None:
            return _BROKEN
        self._key, self._read = text, self._behind_key
        return _INSIDE

    def _behind_key(self, character: str, found: Found) -> str:
        if character in _SPACE:
            return _INSIDE
        self._read = self._before_value
        return _INSIDE if character == ":" else _BROKEN

    def _before_value(self, character: str, found: Found) -> str:
        if character in _SPACE:
            return _INSIDE
        if character in ",}]:":
            return _BROKEN
        self._raw, self._depth, self._quoted = [], 0, False
        if character == '"':
            self._raw, self._read = ['"'], self._in_text
            return _INSIDE
        self._read = self._nested if character in "{[" else self._plain
        return self._read(character, found)

    def _in_text(self, character: str, found: Found) -> str:
        if self._goes_on(character):
            return _INSIDE
        text = self._text()
        if text is None:
            return _BROKEN
        self._read = self._behind_value
        if self._key == self._form.arguments:  # some models write the arguments as a text that holds them
            self._argue(text, found)
        elif self._key == "name" and self._name is None and text:
            self._name = text
            if self._waiting is not None:
                self._begin(found)
        self._close()
        return _INSIDE

    def _nested(self, character: str, found: Found) -> str:
        if self._key == self._form.arguments:
            self._argue(character, found)
        if self._quoted:
            self._quoted = self._goes_on(character)
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._read = self._behind_value
                self._close()
        return _INSIDE

    def _plain(self, character: str, found: Found) -> str:
        """A number or a word."""
        if character in _SPACE or character in ",}":
            self._close()
            self._read = self._behind_value
            return self._behind_value(character, found)
        if self._key == self._form.arguments:
            self._argue(character, found)
        return _INSIDE

    def _behind_value(self, character: str, found: Found) -> str:
        if character == "}":
            return self._end(found)
        if character == ",":
            self._read = self._before_key
        return _INSIDE if character == "," or character in _SPACE else _BROKEN

    def _end(self, found: Found) -> str:
        if not self.begun and self._name is not None and self._form.before:  # a function without arguments
            self._waiting = "{}"
            self._begin(found)
        return _ENDED

    def _goes_on(self, character: str) -> bool:
        """Whether the text goes on behind ``character``."""
        self._raw.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        else:
            return character != '"'
        return True

    def _text(self) -> str | None:
        try:
            found = json.loads("".join(self._raw), strict=False)
        except ValueError:
            return None
        return str(found)

    def _argue(self, text: str, found: Found) -> None:
        if self._argued:
            return
        if not self.begun and self._name is not None:
            self._waiting = ""
            self._begin(found)
        if self.begun:
            found.argue(self.index, text)
        else:
            self._waiting = (self._waiting or "") + text

    def _close(self) -> None:
        """The value has ended. Of arguments that are given twice the first count."""
        self._argued = self._argued or self._key == self._form.arguments

    def _begin(self, found: Found) -> None:
        assert self._name is not None
        self.begun = True
        found.begin(self.index, self._name)
        found.argue(self.index, self._waiting or "")
