"""What HTTP adds to the engine's times: parsing, tokenising and one more process beside the engine's threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from twostroke.planner.hardware.device import Hardware


class Added(NamedTuple):
    """Seconds before a first token, and in each step."""

    request_s: float
    step_s: float


def added_by_http(hardware: Hardware, users: float) -> Added:
    """At ``users`` answers in a step, as calibration measured it at one and at four; nothing where it was not measured."""
    rates = hardware.http
    return Added(0.0, 0.0) if rates is None else Added(rates.request_s, rates.step_s + users * rates.answer_s)


def starts_over_http(prediction: Mapping[str, Any], hardware: Hardware) -> dict[str, float]:
    """Both starts of ``prediction`` with what a server's two processes take beyond importing torch; as they are where no server
    was started in calibration."""
    start_s = None if hardware.http is None else hardware.http.start_s
    more_s = 0.0 if start_s is None else max(0.0, start_s - hardware.process.torch_import_s)
    return {name: prediction[name] + more_s for name in ("startup_s", "warm_startup_s")}
