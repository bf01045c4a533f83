"""Words of a command line: which options were typed, and errors that name them as they were typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import typer

from twostroke.core.errors import InputError, NotCalibratedError

UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""What Typer raises for words that it cannot read. Older versions take it from click, newer ones have their own."""

MAY_BE_EMPTY = frozenset({"prompt", "stop"})
"""Options whose value is any text: the commands themselves say what an empty one is."""

NAMED_DEVICE = " Or name a device: --hardware h100."
"""What helps beside calibrating, where a command has that option."""

TEXT_FLAGS = ("--prompt", "--text")
"""Options that are a command's texts where they are repeatable: what is mostly meant by a word that stands alone."""

_VALUE = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\(.*?\)|\[.*?\]|\S+?(?=[.,;:]*(?:\s|\)|$)))"""
"""A value as an error writes it after ``name=``: quoted, in brackets, or up to the next space without punctuation."""


_QUOTES = "'\""


class Typed(NamedTuple):
    """One word that gives a value. ``name`` is the command's parameter; an argument has its name in the usage, and no flag."""

    name: str
    flag: str | None
    value: str


def command_of(group: Any, words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """The command that ``words`` name below ``group``, and the words after its name."""
    while words and hasattr(group, "list_commands") and (command := group.get_command(None, words[0])) is not None:
        group, words = command, words[1:]
    return group, words


def typed_words(command: Any, words: Sequence[str]) -> Iterator[Typed]:
    """The values among ``words``, which stand after the name of ``command``."""
    options = {flag: p for p in command.params if p.param_type_name == "option" for flag in (*p.opts, *p.secondary_opts)}
    arguments = iter([p.metavar or p.name for p in command.params if p.param_type_name == "argument"])
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        option = options.get(flag)
        if option is None:
            yield Typed(next(arguments, ""), None, word)
        elif not option.is_flag:
            yield Typed(option.name, flag, value if equals else next(rest, "?"))


def refuse_empty(group: Any, words: Sequence[str]) -> None:
    """Raise InputError for an empty word. As a path it would be the working directory, and it mostly comes from a variable of
    the shell that is not set."""
    if "" in words or any(word.endswith("=") for word in words):
        for name, flag, value in typed_words(*command_of(group, words)):
            if value == "" and name not in MAY_BE_EMPTY:
                raise InputError(f"{flag or name} is empty. Give it a value; an unset variable of the shell gives none.")


def as_typed(sentence: str, group: Any, words: Sequence[str]) -> str:
    """``sentence`` of an error with ``name=value`` written as the option of that name, and ``some_name`` as its option.

    The rooms below say what is wrong in the names of their own fields, which a reader of the command line has not seen. A
    command's parameter has the name of the field that it gives, whatever its option is called. What is wrong stands before the
    first full stop: there a value is written as it was typed ("1e-7", where the field holds 107 bytes); after it the sentence
    proposes others. With a recipe, a field that was not typed as an option is a key of the recipe and keeps its name.
    """
    command, rest = command_of(group, words)
    typed = list(typed_words(command, rest))
    has_recipe = any(word.flag is None and word.value.endswith(".toml") for word in typed)
    wrong, stop, proposal = sentence.partition(". ")
    for parameter in command.params:
        given = [word for word in typed if word.flag is not None and word.name == parameter.name]
        if parameter.param_type_name == "option" and (given or not has_recipe):
            flag = (given[0].flag if given else None) or parameter.opts[-1]
            wrong = _renamed(wrong, parameter.name, flag, given[0].value if len(given) == 1 else None)
            proposal = _renamed(proposal, parameter.name, flag, None)
    return f"{wrong}{stop}{proposal}"


def other_remedy(error: Exception, group: Any, words: Sequence[str]) -> str:
    """What else than calibrating helps where a machine has no profile: planning for another, where the command of ``words``
    takes one. Empty of another error or command."""
    command, _ = command_of(group, words)
    takes_one = any("--hardware" in parameter.opts for parameter in command.params)
    return NAMED_DEVICE if takes_one and isinstance(error, NotCalibratedError) else ""


def _renamed(text: str, name: str, flag: str, value: str | None) -> str:
    """``text`` with ``flag`` instead of ``name``, and with ``value``, unless it is None, instead of the value after it."""
    before, after = r"(?<![\w.,\-/'\"·])", r"(?![\w=/'\"]|\.\w)"

    def option(said: re.Match[str]) -> str:
        return f"{flag} {shlex.quote(said[1].strip(_QUOTES) if value is None else value)}"

    table = r"(?:\w+\.)?" if value is not None else ""  # an option that fills a recipe is said of as the recipe's key
    text = re.sub(f"{before}{table}{name}={_VALUE}", option, text)
    return re.sub(f"{before}{name}{after}", flag, text) if "_" in name else text  # one word may be English: "users", "rate"


def usage_sentence(error: Any, group: Any, words: Sequence[str]) -> str:
    """A ``UsageError`` as one sentence that names what was typed, and where the options are listed."""
    text, parameter = error.format_message(), getattr(error, "param", None)
    if parameter is not None and not text.startswith("Missing"):
        given = [word for word in typed_words(*command_of(group, words)) if word.name == parameter.name]
        value, flag = (given[0].value, given[0].flag or parameter.name) if len(given) == 1 else (None, parameter.opts[-1])
        rule = error.message.removeprefix(f"{value} ").removeprefix(f"'{value}' ")  # Typer begins with it; it stands here once
        if not_a_number := re.fullmatch(r"is not a valid (int|float)(eger)?( range)?\.", rule):
            rule = "must be a whole number" if not_a_number[1] == "int" else "must be a number"
        shown = flag if value is None else f"{flag} {shlex.quote(value)}"
        text = f"{shown} {rule}" if rule != error.message else f"{shown} is refused: {rule}"
    command = error.ctx.command_path if error.ctx is not None else "twostroke"
    stop = "" if text.endswith("?") else "."
    return f"{text.rstrip('.')}{stop}{_as_text(error, group, words)} `{command} --help` lists what it takes."


def _as_text(error: Any, group: Any, words: Sequence[str]) -> str:
    """How to write the words behind all arguments of a command whose texts are options; empty of another error or command."""
    command, rest = command_of(group, words)
    flags = [flag for p in command.params for flag in p.opts if flag in TEXT_FLAGS and getattr(p, "multiple", False)]
    left = [word.value for word in typed_words(command, rest) if not word.name]
    if not (flags and left and error.message.startswith("Got unexpected extra argument")):
        return ""
    return f" A text is given as {flags[0]} {shlex.quote(' '.join(left))}."


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether the parameter ``name`` stands on the command line."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def typed_again(context: typer.Context, leaving_out: str) -> list[str]:
    """The words that give the command of ``context`` what it was given, but for the option that is its parameter
    ``leaving_out``."""
    words = [str(context.info_name)]
    for parameter in context.command.params:
        if parameter.name == leaving_out or not is_typed(context, str(parameter.name)):
            continue
        given = context.params[str(parameter.name)]
        for value in given if isinstance(given, list | tuple) else (given,):
            words += [parameter.opts[0]] if parameter.param_type_name == "option" else []
            words += [] if value is True else [str(value)]
    return words
