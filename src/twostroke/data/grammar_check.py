"""``GrammarCheck`` says whether a constraint of an unknown person can be used, before an engine compiles it."""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock

from twostroke.core.errors import InputError
from twostroke.data import grammars
from twostroke.data.grammar_sandbox import COMPILE_S
from twostroke.data.sandbox import TEXT, Sandbox
from twostroke.scheduling.constraint import Constraint

MOST_KNOWN = 256
"""Constraints that were compiled and are not compiled again to see whether they can be."""

_MODULE = "twostroke.data.grammar_sandbox"


class GrammarCheck:
    """Compiles constraints in a process of its own, which is started by the first and replaced if one takes it over 2 s or 256
    MiB. Several threads may share it; constraints are compiled one at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Sandbox | None = None
        self._known: OrderedDict[Constraint, None] = OrderedDict()

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def knows(self, constraint: Constraint) -> bool:
        """Whether ``require`` would return at once."""
        return constraint in self._known

    def require(self, constraint: Constraint) -> None:
        """Return if ``constraint`` can be used. Raises InputError if not, or if compiling takes too much time or memory, and
        ConfigError without llguidance."""
        grammars.library()
        with self._lock:
            if constraint not in self._known:
                self._compile(constraint)
            self._known[constraint] = None
            self._known.move_to_end(constraint)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _compile(self, constraint: Constraint) -> None:
        if self._process is None:
            self._process = Sandbox(_MODULE)
            self._ask(self._process, Constraint.json_object())  # the first frame waits for the process to start
        assert self._process is not None
        self._ask(self._process, constraint)

    def _ask(self, process: Sandbox, constraint: Constraint) -> None:
        kind, text = process.ask(json.dumps([constraint.kind, constraint.text]).encode(), COMPILE_S)
        if not process.alive:
            self._process = None
            text = f"the {grammars.name_of(constraint)} cannot be used: {text}"
        if kind != TEXT:
            raise InputError(f"{text}.", field="constraint")
