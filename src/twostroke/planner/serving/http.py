"""What HTTP adds to the engine's times: parsing, tokenising and one more process beside the engine's threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from twostroke.core.distribution import Distribution
from twostroke.planner.hardware.device import Hardware


class FrontEnd(NamedTuple):
    """A process before the engine that handles one request after another, ``handling_s`` each, and hands on one token after
    another, ``token_s`` each. A request comes to the engine ``delay_s`` later."""

    handling_s: float
    delay_s: float
    token_s: float = 0.0


def http_front_end(hardware: Hardware, prompt_tokens: float = 0, on_all_threads: bool = False) -> FrontEnd | None:
    """For prompts of ``prompt_tokens``, computed ``on_all_threads`` or on fewer; None where calibration did not measure it."""
    rates = hardware.http
    if rates is None:
        return None
    tokens_s = prompt_tokens * rates.prompt_token_s
    later_s = rates.shared_first_s if on_all_threads else 0.0
    later_s += max(0.0, rates.request_s - rates.handling_s)
    return FrontEnd(min(rates.handling_s, rates.request_s) + tokens_s, later_s, rates.token_s)


def idle_s(hardware: Hardware) -> float:
    """What a prompt takes longer on a server that had nothing to do, as calibration measured it; 0 where it did not."""
    return 0.0 if hardware.http is None else hardware.http.idle_s


def step_beside_http_s(hardware: Hardware, users: float) -> float:
    """What a step of ``users`` answers takes longer, as calibration measured it at one and at four; 0 where it did not."""
    rates = hardware.http
    return 0.0 if rates is None else rates.step_s + users * rates.answer_s


def requests_beside_a_step(users: float, output_tokens: float) -> float:
    """Requests that are handled during a step, on average: each of the others asks again after ``output_tokens`` steps. A user
    alone asks while no step runs."""
    return max(0.0, users - 1) / max(1.0, output_tokens)


def step_sharing_s(hardware: Hardware, users: float, output_tokens: float) -> float:
    """What a step of ``users`` answers of ``output_tokens`` on all threads takes longer itself, because HTTP has their
    processors for a while: in each step, for each answer, and for requests that come meanwhile. 0 where calibration did not
    measure it."""
    rates = hardware.http
    if rates is None:
        return 0.0
    requests_s = requests_beside_a_step(users, output_tokens) * rates.shared_request_s
    return rates.shared_step_s + users * rates.shared_answer_s + requests_s


def with_late_tokens(gaps: Distribution, hardware: Hardware) -> Distribution:
    """``gaps`` between tokens with the tail that HTTP and its client have even at one user."""
    if hardware.http is None:
        return gaps
    p90, p95, p99 = (share * gaps.median for share in hardware.http.late_shares)
    return replace(gaps, p90=gaps.p90 + p90, p95=gaps.p95 + p95, p99=gaps.p99 + p99)


def starts_over_http(prediction: Mapping[str, Any], hardware: Hardware) -> dict[str, float]:
    """Both starts of ``prediction`` with what a server's two processes take beyond importing the engine; as they are where no
    server was started in calibration."""
    start_s = None if hardware.http is None else hardware.http.start_s
    more_s = 0.0 if start_s is None else max(0.0, start_s - hardware.process.import_s("serve"))
    return {name: prediction[name] + more_s for name in ("startup_s", "warm_startup_s")}
