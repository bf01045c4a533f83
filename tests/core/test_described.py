"""Objects as plain data by what their annotations say."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pytest

from twostroke.core.described import As, LeftOut, keys_of, plain

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True)
class Undescribed:
    a: int
    b: tuple[float, ...]
    c: Fraction | None = None  # a name that exists for types alone is not asked for

    @property
    def total(self) -> Annotated[float, "sum of b"]:
        return sum(self.b)

    @property
    def hidden(self) -> float:
        return 0.0


class Pair(NamedTuple):
    first: Annotated[int, "one"]
    second: Annotated[Undescribed | None, "two", LeftOut] = None


@dataclass(frozen=True, slots=True)
class Described:
    DOCUMENT = "kind seconds share pairs"

    seconds_each: Annotated[float, "s", "of each", As("seconds")]
    pairs: Annotated[tuple[Pair, ...], "some"]
    private: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> Annotated[str, "what it is"]:
        return "described"

    def share(self) -> Annotated[float, float | None, "of nothing; null"]:
        return math.nan


def test_a_class_without_annotations_shows_every_field_and_described_properties() -> None:
    assert plain(Undescribed(1, (1.0, math.inf))) == {"a": 1, "b": [1.0, None], "c": None, "total": None}


def test_a_described_class_shows_what_is_described_in_its_order_under_its_names() -> None:
    document = plain(Described(2.0, (Pair(1), Pair(2, Undescribed(3, ()))), {"x": 1}))
    assert list(document) == ["kind", "seconds", "share", "pairs"]
    inner = {"a": 3, "b": [], "c": None, "total": 0}
    assert document == {
        "kind": "described",
        "seconds": 2.0,
        "share": None,
        "pairs": [{"first": 1}, {"first": 2, "second": inner}],
    }


def test_units_shapes_and_absence_are_read_from_the_annotation() -> None:
    seconds = next(key for key in keys_of(Described) if key.name == "seconds")
    assert (seconds.attribute, seconds.unit, seconds.meaning, seconds.shape) == ("seconds_each", "s", "of each", float)
    share = next(key for key in keys_of(Described) if key.name == "share")
    assert (share.unit, share.shape, share.called) == ("", float | None, True)
    assert [key.left_out for key in keys_of(Pair)] == [False, True]


@pytest.mark.parametrize("order", ["first", "first second third", "first first second"])
def test_an_order_that_names_other_keys_is_refused(order: str) -> None:
    with pytest.raises(TypeError, match="must name each key once"):
        keys_of(type("Wrong", (Pair,), {"DOCUMENT": order}))


def test_plain_data_stays_as_it_is() -> None:
    given: Any = {"a": [1, 2.5, None, True, "text"], "b": {"c": (1, 2)}, "d": Path("x/y")}
    assert plain(given) == {"a": [1, 2.5, None, True, "text"], "b": {"c": [1, 2]}, "d": "x/y"}


def test_describing_a_plan_costs_nothing_until_a_document_is_asked_for() -> None:
    code = (
        "import twostroke.planner.training, twostroke.planner.serving\n"
        "from twostroke.core.described import keys_of\n"
        "assert keys_of.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
