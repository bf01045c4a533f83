"""The planner's step times as the few numbers by which the scheduler bounds prompts beside requests that decode."""

from __future__ import annotations

from twostroke.core import policy
from twostroke.core.engine_settings import OFF
from twostroke.planner.serving.strategy import Chunk, StepSeconds
from twostroke.scheduling.pace import Pace, StepCosts

_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
_FEW, _LONG = 8, 2048
"""Requests, and tokens before each, at which the price of a key is taken."""


def step_costs(seconds: StepSeconds, most_rows: int) -> StepCosts:
    """``seconds`` at rows up to ``most_rows`` at least and at two contexts: linear in the keys that are read, as steps are but
    for what caches hold."""
    rows = tuple(n for i, n in enumerate(_ROWS) if i == 0 or _ROWS[i - 1] < most_rows)
    key_s = max(0.0, (seconds(_FEW, _LONG, ()) - seconds(_FEW, 1, ())) / (_FEW * (_LONG - 1)))
    n = rows[-1]
    alone = [seconds(0, 0, (Chunk(0, each),)) for each in rows]
    pair_s = max(0.0, (seconds(0, 0, (Chunk(_LONG, n),)) - alone[-1]) / (_LONG * n))
    return StepCosts(
        rows,
        tuple(max(1e-9, seconds(each, 1, ()) - each * key_s) for each in rows),
        tuple(max(1e-9, found - pair_s * each**2 / 2) for each, found in zip(rows, alone, strict=True)),
        key_s,
        pair_s,
    )


def pace_of(seconds: StepSeconds, ratio: str, token_budget: int, page_tokens: int = policy.PAGE_TOKENS) -> Pace | None:
    """What ``EngineSettings.max_step_ratio`` asks for; None for "off"."""
    if ratio == OFF:
        return None
    return Pace(step_costs(seconds, token_budget), policy.STEP_RATIO if ratio == "auto" else float(ratio), page_tokens)
