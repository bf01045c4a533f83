"""Seconds that choosing tokens takes beyond the largest logit, at the rates that calibration measured."""

from __future__ import annotations

from twostroke.core.named import letter, named
from twostroke.core.rates import SamplingRate
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.shape import ServingShape


def choosing_s(shape: ServingShape, hardware: Hardware, rows: float, vocabulary: int) -> float:
    """A call for each kind that ``shape`` asks for, on ``rows`` rows of logits; 0 where it was not measured."""
    seconds = 0.0
    for rate in (rate for rate in hardware.sampling if rate.kind in shape.sampling):
        seconds = seconds + kind_s(rate, rows, vocabulary)
    return named("choosing_s", seconds, "s", "draws, filters, penalties and log-probabilities, as calibrated", "measured")


def kind_s(rate: SamplingRate, rows: float, vocabulary: int) -> float:
    """What one kind takes beyond the largest logit of so many rows."""
    row_s = letter("row", rate.row_s) + letter("V", vocabulary) * letter("logit", rate.logit_s)
    return letter("call", rate.call_s) + rows * row_s
