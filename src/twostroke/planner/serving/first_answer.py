"""A new process's first answers: Python, torch and the system do everything in them for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.planner.hardware.device import Hardware


def as_first_answers(
    prediction: Mapping[str, Any], prompt_tokens: int, output_tokens: int, hardware: Hardware
) -> dict[str, Any]:
    """``prediction`` of requests of these lengths (all that come at once) as a process's first: the first prompt and the first
    tokens take longer by what calibration measured. As it is where that was not measured."""
    values, first = dict(prediction), hardware.first_uses
    if first is None:
        return values
    steps = output_tokens - 1
    later_s = first.tokens_s * min(1.0, steps / first.tokens)
    prompt_s = prompt_tokens / values["prefill_tok_per_s"]
    values["prefill_tok_per_s"] *= prompt_s / (prompt_s + first.prompt_s)
    values["ttft_s"] += first.prompt_s
    if steps:
        slower = 1 + later_s / steps / values["tpot_s"]
        values["tpot_s"] *= slower
        values["decode_tok_per_s"] /= slower
    longer = 1 + (first.prompt_s + later_s) / values["e2e_s"]
    values["e2e_s"] *= longer
    values["output_tok_per_s"] /= longer
    if "cost_per_mtok_usd" in values:
        values["cost_per_mtok_usd"] *= longer
    return values
