from __future__ import annotations

from typing import Any

import pytest

from twostroke.training.observers import Observer
from twostroke.training.start import train


class _Failing(Observer):
    name = "the clumsy one"

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            raise RuntimeError("it broke\nin many lines")

    def begin(self, run: Any) -> None:
        self._maybe("begin")

    def after_step(self, run: Any, record: Any) -> dict[str, Any]:
        self._maybe("after_step")
        return {}

    def after_line(self, line: dict[str, Any]) -> None:
        self._maybe("after_line")

    def close(self) -> None:
        self._maybe("close")


@pytest.mark.parametrize("where", ["begin", "after_step", "after_line", "close"])
def test_an_observer_that_fails_is_said_so_of_once_and_the_run_goes_on(make_recipe, where: str) -> None:
    said: list[str] = []
    observer = _Failing(where)
    result = train(make_recipe(steps=3), log=said.append, observers=[observer])
    assert result.summary["steps"] == 3
    assert observer.calls == 1
    assert [line for line in said if "clumsy" in line] == ["the clumsy one ended: it broke. Training continues without."]
