"""Seconds that choosing tokens takes beyond the largest logit, at the rates that calibration measured."""

from __future__ import annotations

from twostroke.core.named import letter, named
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.shape import ServingShape


def choosing_s(shape: ServingShape, hardware: Hardware, rows: float, vocabulary: int) -> float:
    """A call for each kind that ``shape`` asks for, on ``rows`` rows of logits; 0 where it was not measured."""
    asked = [rate for rate in hardware.sampling if rate.kind in shape.sampling]
    seconds = sum(
        letter("call", rate.call_s)
        + rows * (letter("row", rate.row_s) + letter("V", vocabulary) * letter("logit", rate.logit_s))
        for rate in asked
    )
    return named("choosing_s", seconds, "s", "draws, filters, penalties and log-probabilities, as calibrated", "measured")
