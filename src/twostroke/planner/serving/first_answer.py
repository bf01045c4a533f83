"""The first of several answers, which takes longer than the others: in a new process, or after a pause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.http import idle_s


def as_first_answers(
    prediction: Mapping[str, Any], prompt_tokens: int, output_tokens: int, hardware: Hardware
) -> dict[str, Any]:
    """``prediction`` of requests of these lengths (all that come at once) as a process's first: Python, torch and the system do
    everything for the first time in the first prompt and the first tokens, which take longer by what calibration measured. As
    it is where that was not measured."""
    first = hardware.first_uses
    if first is None:
        return dict(prediction)
    steps = output_tokens - 1
    return _longer(prediction, prompt_tokens, first.prompt_s, steps, first.tokens_s * min(1.0, steps / first.tokens))


def after_a_pause(prediction: Mapping[str, Any], prompt_tokens: int, hardware: Hardware) -> dict[str, Any]:
    """``prediction`` of requests that all come at once, after other steps or none: caches and threads that computed no prompts
    before make the first one take ``idle_s`` longer."""
    return _longer(prediction, prompt_tokens, idle_s(hardware))


def _longer(
    prediction: Mapping[str, Any], prompt_tokens: int, prompt_s: float, steps: int = 0, steps_s: float = 0.0
) -> dict[str, Any]:
    """``prediction`` whose prompts take ``prompt_s`` longer together, and its ``steps`` after them ``steps_s``."""
    values = dict(prediction)
    before_s = prompt_tokens / values["prefill_tok_per_s"]
    values["prefill_tok_per_s"] *= before_s / (before_s + prompt_s)
    values["ttft_s"] += prompt_s
    if steps:
        slower = 1 + steps_s / steps / values["tpot_s"]
        values["tpot_s"] *= slower
        values["decode_tok_per_s"] /= slower
    longer = 1 + (prompt_s + steps_s) / values["e2e_s"]
    values["e2e_s"] *= longer
    values["output_tok_per_s"] /= longer
    if "cost_per_mtok_usd" in values:
        values["cost_per_mtok_usd"] *= longer
    return values
