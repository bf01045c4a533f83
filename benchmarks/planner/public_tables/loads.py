"""The public rows' loads as the field generates them, on the planner's step times: a closed loop of so many users, each engine
with its own rules and with what its recipe sets (``recipes.py``).

InferenceX sends requests = 10 · concurrency, all of the first wave at once, with lengths from 0.8 of the stated one to all of
it; its warm-up of 2 · concurrency has ended before (``recipes.WARMED_UP_SINCE``). The other rows are read the same way, with
equal lengths. TTFT has neither HTTP nor tokenising in it: ``fit.front_ends_s`` finds what they take.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.policy import PAGE_TOKENS
from twostroke.planner.serving.drawn import Uniform
from twostroke.planner.serving.simulation import Simulated, simulate
from twostroke.planner.serving.step_table import StepTable
from twostroke.planner.serving.step_time import Efficiencies, one_pass
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.workload import Workload

sys.path[:0] = [str(Path(__file__).parent)]
from recipes import policy_with_recipe  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WAVES = 10
"""Requests ÷ concurrency."""


def step_seconds(row: Any, rates: Efficiencies) -> Callable[[int, float, Sequence[Chunk]], float]:
    """A step of the row's copy of the model, as ``Datasheet.step_seconds`` computes it of a plan's."""

    def of(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        new = sum(chunk.new for chunk in chunks)
        mean = new / len(chunks) if chunks else 0.0
        keys = sum(chunk.new * (2 * chunk.before + chunk.new) for chunk in chunks) / new if new else 0.0
        return one_pass(
            row.spec, row.precision, row.width, row.at, row.hardware, decoding=decoding, context=context, prompts=len(chunks),
            prompt_tokens=(keys + mean) / 2, hit_tokens=(keys - mean) / 2,
        ).seconds(rates)  # fmt: skip

    return of


def simulated(row: Any, rates: Efficiencies, cache_tokens: float, waves: int = WAVES) -> Simulated:
    """The row's load. Attention groups are taken as one scheduler with the budgets of all."""
    policy, groups = policy_with_recipe(row), row.at.attention_groups
    prompts, answers = (Uniform(max(1, int(row.shortest * n)), n) for n in (row.prompt, row.output))
    load = Workload.closed(row.batch, waves * row.batch, prompts, answers)
    seconds = StepTable(step_seconds(row, rates))
    pages = int(cache_tokens) // PAGE_TOKENS
    return simulate(
        load, policy, seconds, pages, token_budget=policy.token_budget * groups, max_running=policy.max_running * groups
    )
