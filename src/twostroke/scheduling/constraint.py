"""``Constraint``: what form an answer must have, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from twostroke.core.errors import InputError

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
KINDS: tuple[str, ...] = get_args(Kind)

MAX_CHARACTERS = 2**17
"""Of a constraint's text. OpenAI allows schemas of 120,000 characters."""


@dataclass(frozen=True)
class Constraint:
    """``text`` is a JSON schema, a regular expression that the whole answer matches, a JSON list of the texts that may be
    answered, or a grammar in llguidance's variety of Lark; of ``json_object`` it is empty.

    Raises InputError for another kind, for text that is too long, and for what can be seen to be no schema or list. Whether
    the rest is well-formed shows when it is compiled (``data.grammars``).
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"a constraint's kind {self.kind!r:.40} must be one of {', '.join(KINDS)}.", field="constraint")
        if not isinstance(self.text, str) or len(self.text) > MAX_CHARACTERS:
            raise InputError(
                f"a constraint's {self.kind} must be text of at most {MAX_CHARACTERS} characters.", field="constraint"
            )
        if self.kind in ("json_schema", "choice"):
            self._check_json()

    def _check_json(self) -> None:
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            raise InputError(f"a constraint's {self.kind} must be JSON.", field="constraint") from None
        if self.kind == "json_schema":
            if not isinstance(found, dict | bool):
                raise InputError("a JSON schema must be an object.", field="constraint")
        elif not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
            raise InputError("a choice must be a list of texts, none of them empty.", field="constraint")

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """JSON that ``schema`` allows, given as JSON's text or as what it means."""
        return cls("json_schema", schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """One of ``texts``."""
        return cls("choice", _json(list(texts)))

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        return cls("grammar", lark)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InputError("a constraint must be made of what JSON has.", field="constraint") from None
