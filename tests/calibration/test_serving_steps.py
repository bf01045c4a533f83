"""Decode steps are timed around the context that they stand for."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.calibration.serving_steps import LEAST_GROUPS, WARM_UP, Prompts, decode_step_s
from twostroke.calibration.timing import Clock


class CountingEngine:
    """Each request's first token comes with the first step. It notes how many tokens each step had before it."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(vocab_size=100)
        self.contexts: list[float] = []
        self._tokens: dict[str, int] = {}
        self._limits: dict[str, int] = {}

    def add_request(self, name: str, tokens: list[int], params: Any) -> None:
        self._tokens[name], self._limits[name] = len(tokens), len(tokens) + params.max_tokens

    def step(self) -> list[Any]:
        self.contexts.append(statistics.mean(self._tokens.values()))
        for name in self._tokens:
            self._tokens[name] += 1
            assert self._tokens[name] <= self._limits[name]
        return [SimpleNamespace(request_id=name) for name in self._tokens]

    def abort(self, name: str) -> None:
        del self._tokens[name]


@pytest.mark.parametrize("batch", [1, 4, 8, 32])
@pytest.mark.parametrize("context", [128, 1024])
def test_the_mean_context_of_the_timed_steps_is_the_one_asked_for(batch: int, context: int) -> None:
    engine = CountingEngine()
    decode_step_s(Clock(), engine, Prompts(), batch, context)  # type: ignore[arg-type]
    timed = engine.contexts[1 + WARM_UP :]
    assert len(timed) >= 2 * LEAST_GROUPS
    assert statistics.mean(timed) == pytest.approx(context, abs=2)
    assert engine._tokens == {}
