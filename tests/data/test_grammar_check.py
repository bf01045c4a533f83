"""Constraints of unknown people: compiled in a process with limits, and refused in a sentence."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from twostroke.core.errors import ConfigError, InputError
from twostroke.data.grammar_check import GrammarCheck
from twostroke.scheduling.constraint import Constraint

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    made = GrammarCheck()
    yield made
    made.close()


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "twostroke.data.grammar_sandbox" in p.cmdline()]


def test_what_can_be_used_is_known_and_what_cannot_gets_a_sentence(check: GrammarCheck) -> None:
    good = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert not check.knows(good)
    check.require(good)
    assert check.knows(good)
    for bad in (Constraint.regex("a("), Constraint.json_schema({"type": "x"}), Constraint.grammar("start: <[999]>")):
        with pytest.raises(InputError, match="cannot be used: ") as caught:
            check.require(bad)
        assert (caught.value.field, check.knows(bad)) == ("constraint", False)
    assert len(children()) == 1


def test_what_compiles_for_ever_is_ended_and_the_next_is_compiled(check: GrammarCheck) -> None:
    began = time.monotonic()
    # A fast processor comes to the limit of memory before that of time.
    with pytest.raises(InputError, match=r"JSON schema cannot be used: (it takes over 2 s|its process ended)\."):
        check.require(Constraint.json_schema({"type": "integer", "multipleOf": 99_999_989}))
    assert time.monotonic() - began < 10
    check.require(Constraint.regex("b+"))
    assert len([p for p in children() if p.cpu_times().user > 1.5]) == 0


def test_what_takes_gigabytes_stays_in_its_process(check: GrammarCheck) -> None:
    """Refused by llguidance's limits, by the time or by the memory."""
    before = psutil.Process().memory_info().rss
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer", "multipleOf": 9973 + i} for i in range(200)}}
    deep = {"allOf": [{"anyOf": [{"pattern": f"a{{{i}}}"}, {"minLength": i}]} for i in range(40)]}
    for schema in (wide, deep):
        with pytest.raises(InputError, match="cannot be used: "):
            check.require(Constraint.json_schema(schema))
    check.require(Constraint.choice(["a", "b"]))
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_without_llguidance_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    before = children()
    with pytest.raises(ConfigError, match="pip install llguidance"):
        GrammarCheck().require(Constraint.regex("a"))
    assert children() == before
