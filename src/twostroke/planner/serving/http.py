"""What HTTP adds to the engine's times: parsing, tokenising and one more process beside the engine's threads."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.planner.hardware.device import Hardware


class Added(NamedTuple):
    """Seconds before a first token, and in each step."""

    request_s: float
    step_s: float


def added_by_http(hardware: Hardware, users: float) -> Added:
    """At ``users`` answers in a step, as calibration measured it at one and at four; nothing where it was not measured."""
    rates = hardware.http
    return Added(0.0, 0.0) if rates is None else Added(rates.request_s, rates.step_s + users * rates.answer_s)
