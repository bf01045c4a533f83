"""Compiles the forms that answers must have, by llguidance (MIT). Imports no torch, and llguidance only when it is needed."""

from __future__ import annotations

import json
import re
from typing import Any

from twostroke.core.errors import ConfigError, InputError
from twostroke.scheduling.constraint import Constraint

MOST_LEXER_STATES = 20_000
"""Of one answer: llguidance takes 1 to 2 kB a state, so 40 MB at most. Its own limit is 250,000."""
MOST_SYMBOLS = 100_000
STEP_FUEL, STEP_ITEMS = 200_000, 50_000
"""Of one mask: what its lexer may do, and items of its parser. Beyond them the answer fails."""
FREELY = '%llguidance {"no_forcing": true}'
"""The line of a grammar by which every way of cutting a text into tokens is allowed."""
_SENTENCE = 240


def library() -> Any:
    """The package llguidance. Raises ConfigError with what to install."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "answers of a given form need the package llguidance, which is not installed: pip install llguidance.",
            field="constraint",
        ) from None
    return llguidance


class _Bytes:
    """A vocabulary of single bytes and an end. Whether a grammar can be used does not depend on the vocabulary."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_vocabulary() -> Any:
    """An ``LLTokenizer`` of bytes, made in a few milliseconds, where the served model's takes a second."""
    found = library()
    return found.LLTokenizer(found.TokenizerWrapper(_Bytes()))


def compiled(constraint: Constraint, vocabulary: Any) -> Any:
    """An ``LLMatcher`` of ``constraint`` over ``vocabulary``, an ``LLTokenizer``, at the beginning of an answer.

    Releases the interpreter meanwhile. Raises InputError if the constraint is malformed, uses what llguidance does not know,
    allows no text at all, or goes beyond llguidance's limits. None of these limits time: a schema can take minutes.
    """
    found = library()
    limits = found.LLParserLimits(
        max_lexer_states=MOST_LEXER_STATES, max_grammar_size=MOST_SYMBOLS, step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS,
        verbose_errors=False,
    )  # fmt: skip
    try:
        matcher = found.LLMatcher(vocabulary, _grammar(constraint, found.LLMatcher), log_level=0, limits=limits)
    except ValueError as error:
        raise _refused(constraint, str(error)) from None
    if not matcher.is_error():
        matcher.compute_bitmask()  # what allows no text shows only here
    if matcher.is_error():
        raise _refused(constraint, matcher.get_error())
    return matcher


def _grammar(constraint: Constraint, matcher: Any) -> str:
    """In llguidance's Lark. Where one text alone can follow, llguidance would allow one way of cutting it into tokens; that is
    left to grammars that are given."""
    text = constraint.text
    match constraint.kind:
        case "grammar":
            return str(matcher.grammar_from_lark(text))
        case "json_object":
            rule = 'start: %json {"type": "object"}'
        case "json_schema":
            rule = f"start: %json {json.dumps(json.loads(text))}"
        case "choice":
            rule = "start: " + " | ".join(map(json.dumps, json.loads(text)))  # JSON's strings are Lark's
        case "regex":
            rule = json.loads(matcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return str(matcher.grammar_from_lark(f"{FREELY}\n{rule}"))


def name_of(constraint: Constraint) -> str:
    """What it is called in a sentence."""
    names = {"json_schema": "JSON schema", "json_object": "JSON object", "regex": "regular expression"}
    return names.get(constraint.kind, constraint.kind)


def _refused(constraint: Constraint, error: str) -> InputError:
    # Without the lines that show the place in a grammar, which may have been made of what was given.
    lines = [line for line in error.splitlines() if line.strip(" ^") and not re.match(r" *\d+ \| |<", line)]
    said = " ".join(" ".join(lines).split()).rstrip(".")
    if constraint.kind != "grammar":  # a place in a grammar that nobody has seen
        said = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said)
    if "NoExtension" in said:
        said = "no text has this form"
    said = said if len(said) <= _SENTENCE else f"{said[:_SENTENCE]}…"
    return InputError(f"the {name_of(constraint)} cannot be used: {said}.", field="constraint")
