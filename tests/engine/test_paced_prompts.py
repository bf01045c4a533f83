"""Prompts that are bounded beside requests that decode: the same answers, and what is measured reaches the bound."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.engine.core import EngineCore
from twostroke.kernels.native_library import library
from twostroke.scheduling.pace import Pace, StepCosts
from twostroke.scheduling.sampling_params import SamplingParams

RUNNERS = ["torch", *(["native"] if library() is not None else [])]
COSTS = StepCosts((1, 64), (1e-3, 2e-3), (1e-3, 20e-3), 1e-8, 1e-8)


def answers(core: EngineCore) -> tuple[dict[str, list[int]], int]:
    """Greedy answers to prompts that come while others are decoded, and how many steps had both."""
    chance = random.Random(4)
    prompts = [[chance.randrange(97) for _ in range(n)] for n in (5, 90, 30, 61, 17, 88)]
    found: dict[str, list[int]] = {}
    while prompts or core.has_work:
        if prompts and sum(map(len, found.values())) >= 3 * (len(found) - 1):
            name = f"r{len(found)}"
            found[name] = []
            core.add_request(name, prompts.pop(0), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
        for event in core.step():
            found[event.request_id] += event.token_ids
    return found, core.stats().mixed_steps


@pytest.mark.parametrize("runner", RUNNERS)
def test_greedy_answers_do_not_depend_on_the_bound(tmp_path: Path, runner: str) -> None:
    _, directory = saved("llama", tmp_path)
    settings = EngineSettings(dtype="fp32", runner=runner)
    free, bounded = EngineCore(directory, settings), EngineCore(directory, settings)
    bounded.scheduler.pace = pace = Pace(COSTS, 1.5, bounded.scheduler.config.page_tokens)
    expected, n_free = answers(free)
    found, n_bounded = answers(bounded)
    assert found == expected
    assert n_bounded > n_free, "the bound cut nothing"
    assert pace.limit_s(1, 0, 0) != pytest.approx(1.5 * COSTS.decode(1, 0)), "no step was measured"


def test_a_machine_that_was_not_calibrated_has_no_bound_and_refuses_one_that_is_asked_for(tmp_path: Path) -> None:
    _, directory = saved("llama", tmp_path)
    assert EngineCore(directory).scheduler.pace is None
    with pytest.raises(ConfigError, match=r"max_step_ratio=1\.5.*twostroke calibrate"):
        EngineCore(directory, EngineSettings(max_step_ratio="1.5"))
