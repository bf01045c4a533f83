"""Writes the ledger entry of one server: what the planner predicted before it started, and what was measured."""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.described import plain
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.families import read_config, spec_from_config
from twostroke.planner.choosing.server_settings import Level, ServerChoice
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.adapters import adapters_in
from twostroke.planner.serving.http import starts_over_http
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import Slo, sending_s
from twostroke.planner.truth.recording import Planned, recording
from twostroke.quantization.held import serving_shape
from twostroke.server import wire
from twostroke.server.metrics import Metrics
from twostroke.server.served import Answer, Served, in_flight, peak_memory_bytes
from twostroke.server.wait import PlannedSteps

log = logging.getLogger("twostroke.server")


TIMES = ("ttft_s", "tpot_s", "e2e_s", "prefill_tok_per_s", "decode_tok_per_s", "output_tok_per_s")
"""Predicted numbers that hold only for one request at a time of the predicted shape."""

ALIKE = 1.25
"""Factor within which lengths count as the predicted ones, and so does the number at once, with room for a few that overlap."""


def unlike(shape: ServingShape | None, medians: Mapping[str, float], engine: Mapping[str, float]) -> str:
    """Why the served requests do not test a prediction for ``shape``, in a sentence; empty if they do."""
    if shape is None or "prompt_tokens" not in medians:
        return "no request was answered." if shape is not None else ""
    steps = engine.get("decode_steps", 0.0)
    at_once = engine.get("decode_requests", 0.0) / steps if steps else 1.0
    prompt, output = medians["prompt_tokens"], medians["output_tokens"]
    pairs = ((prompt, shape.prompt_tokens), (output, shape.output_tokens), (at_once, shape.batch))
    if all(predicted / ALIKE <= found <= predicted * ALIKE for found, predicted in pairs):
        return ""
    return (
        f"predicted for {shape.prompt_tokens} + {shape.output_tokens} tokens, {shape.batch} request at a time; served were "
        f"medians of {prompt:g} + {output:g} tokens, {at_once:.3g} at a time. `twostroke bench serve` predicts its own load."
    )


LEAST_ANSWERS = 10
"""Answers whose means are scored."""

NEAR_USERS = math.sqrt(2)
"""Factor within which requests in flight count as so many users: levels are doublings."""


def by_users(levels: Iterable[Level]) -> dict[str, float]:
    """Means by the ledger's names: ``ttft_of_8_s`` and ``tpot_of_8_s`` are those of eight requests in flight."""
    named = ((f"{name}_of_{level.users}_s", getattr(level, f"{name}_s")) for level in levels for name in ("ttft", "tpot"))
    return {name: value for name, value in named if value > 0}


def served_levels(answers: Sequence[Answer], levels: Sequence[Level], shape: ServingShape) -> list[Level]:
    """What answers about as long as those of ``shape`` found, by how many requests were in flight; without the levels that too
    few of them belong to."""
    known, found = {level.users for level in levels}, dict[int, list[Answer]]()
    for answer, beside in zip(answers, in_flight(answers), strict=True):
        alike = (
            shape.prompt_tokens / ALIKE <= answer.prompt_tokens <= shape.prompt_tokens * ALIKE
            and shape.output_tokens / ALIKE <= answer.output_tokens <= shape.output_tokens * ALIKE
        )
        users = min(known, key=lambda n: abs(math.log(beside / n)), default=0)
        if alike and users and users / NEAR_USERS <= beside <= users * NEAR_USERS:
            found.setdefault(users, []).append(answer)
    return [_level(users, those) for users, those in sorted(found.items()) if len(those) >= LEAST_ANSWERS]


def _level(users: int, answers: Sequence[Answer]) -> Level:
    tpot = [found for answer in answers if (found := _tpot_s(answer)) is not None]
    first_s = statistics.fmean(answer.first_s for answer in answers if answer.first_s is not None)
    return Level(users, first_s, statistics.fmean(tpot) if tpot else 0.0, 0.0)


def _tpot_s(answer: Answer) -> float | None:
    if answer.first_s is None or answer.output_tokens < 2:
        return None
    return (answer.whole_s - answer.first_s) / (answer.output_tokens - 1)


def within_slo(answers: Sequence[Answer], slo: Slo) -> dict[str, float]:
    """The mean TTFT and TPOT of all answers, and the share of answers that keep to ``slo``; nothing without answers."""
    if not answers:
        return {}
    pairs = [(answer.first_s or 0.0, _tpot_s(answer) or 0.0) for answer in answers]
    ttft_s, tpot_s = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    share = sum(slo.met(*pair) for pair in pairs) / len(pairs)
    return {"served_mean_ttft_s": ttft_s, "served_mean_tpot_s": tpot_s, "served_within_slo": share}


@dataclass(frozen=True)
class Transfers:
    """Prompts are computed by other engines, all ``near``: on this machine."""

    near: bool


def transferred(shape: ServingShape | None, engine: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """Mean bytes and seconds of the handovers that an engine counted, and why they do not test a prediction for ``shape``."""
    n = engine.get("handover_requests", 0.0)
    if not n:
        return {}, "no prompt was handed over."
    values = {"transfer_bytes": engine["handover_bytes"] / n, "transfer_s": engine["handover_s"] / n}
    tokens = engine["handover_tokens"] / n
    if shape is None or shape.prompt_tokens / ALIKE <= tokens <= shape.prompt_tokens * ALIKE:
        return values, ""
    return values, f"predicted for {shape.prompt_tokens} tokens; {tokens:.4g} were handed over on average."


class ServeRecord:
    """The entry of one server with ``adapters``, directories by name. Its prediction is frozen before the model is loaded.
    With ``transfers`` it is what `plan serve --disaggregate` says of a prompt's way, and what does not depend on time."""

    def __init__(
        self,
        directory: Path,
        settings: EngineSettings,
        adapters: Mapping[str, str] | None = None,
        choice: ServerChoice | None = None,
        transfers: Transfers | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._transfers = transfers
        self._shape: ServingShape | None = None
        self._choice = choice
        self._settings = settings
        self._planned: ServingPlan | None = None
        inputs = {"directory": str(directory), **plain(settings), **({} if choice is None else {"choice": plain(choice)})}
        plan = functools.partial(self._plan, directory, settings, [Path(each) for each in (adapters or {}).values()])
        self._run = recording("serve", directory.resolve().name, inputs, plan, say)

    @property
    def run_id(self) -> str | None:
        return self._run.run_id

    def show_prediction(self, metrics: Metrics) -> None:
        """Let ``/metrics`` show the predicted latencies, if there is a prediction."""
        if self._shape is not None:
            values = {name: self._run.prediction.get(f"{name}_s") for name in ("ttft", "tpot", "e2e")}
            known = {name: value for name, value in values.items() if value is not None}
            metrics.predict(known, self._shape.prompt_tokens, self._shape.output_tokens)

    @property
    def planned(self) -> ServingPlan | None:
        return self._planned

    def steps(self) -> PlannedSteps | None:
        """The planned seconds of the engine's steps, if there is a plan."""
        return None if self._planned is None else PlannedSteps(self._planned, self._settings, self._settings.replicas)

    def _plan(self, directory: Path, settings: EngineSettings, adapters: Sequence[Path]) -> Planned:
        if settings.replicas > 1:
            raise ConfigError("plans know one engine that has the machine to itself, not several (--replicas).")
        spec = spec_from_config(read_config(directory))
        longest = min(settings.max_model_len or spec.max_positions, spec.max_positions)
        # The planner's usual shape: a prompt of half a short context, and of at most 512 tokens.
        prompt = max(1, min(512, longest // 2))
        lengths = {"prompt_tokens": prompt, "output_tokens": max(1, min(128, longest - prompt))}
        if self._choice is not None:
            lengths = {"prompt_tokens": self._choice.prompt_tokens, "output_tokens": self._choice.output_tokens}
        shape = serving_shape(directory, spec, settings, batch=1, adapters=adapters_in(adapters), **lengths)
        if longest < 2:
            raise ConfigError("max_model_len=1 leaves no room for an answer.")
        hardware = load_hardware("this", "serve")
        self._shape = shape
        self._planned = planned = plan_serving(spec, shape, hardware)
        values = planned.prediction()
        if self._transfers is not None:
            self._planned = None  # of an engine that computes prompts as well
            sent = {"transfer_bytes": planned.kv_request_bytes, "transfer_s": sending_s(planned, self._transfers.near)}
            timeless = {name: value for name, value in values.items() if name not in (*TIMES, "energy_per_mtok_kwh")}
            return Planned(timeless | sent, hardware, {"shape": plain(shape)})
        values |= starts_over_http(values, hardware) | by_users(() if self._choice is None else self._choice.levels)
        return Planned(values, hardware, {"shape": plain(shape)})

    def started(self, ready: wire.Ready, startup_s: float) -> None:
        values = {
            "warm_startup_s" if ready.loaded_packed else "startup_s": startup_s,
            "weights_bytes": ready.weights_bytes,
            "kv_cache_bytes": ready.kv_cache_bytes,
        }
        self._run.measure(values, "partial")

    def ended(self, served: Served, engine: Mapping[str, float]) -> None:
        """Record latencies, rates and memory of what was served, while the engine still answers. Times have the prediction's
        names if the traffic was like the predicted one (``unlike``), else the names ``served_…``, with the reason."""
        medians = served.medians()
        why = unlike(self._shape, medians, engine)
        prefix = "served_" if why else ""
        times = {name: value for name, value in medians.items() if name.endswith("_s")}
        for phase in ("prefill", "decode"):
            if engine.get(f"{phase}_s"):
                times[f"{phase}_tok_per_s"] = engine[f"{phase}_tokens"] / engine[f"{phase}_s"]
        busy_s = sum(engine.get(f"{phase}_s", 0.0) for phase in ("prefill", "mixed", "decode"))
        if busy_s:
            times["output_tok_per_s"] = engine.get("output_tokens", 0.0) / busy_s
        values: dict[str, Any] = {f"{prefix}{name}": value for name, value in times.items()}
        values |= {f"served_median_{name}": value for name, value in medians.items() if name.endswith("_tokens")}
        values["http_peak_memory_bytes"] = peak_memory_bytes()
        if "peak_memory_bytes" in engine:
            values["peak_memory_bytes"] = engine["peak_memory_bytes"]
        reasons = dict.fromkeys(TIMES, why) if why else {}
        if self._transfers is not None:
            sent, why = transferred(self._shape, engine)
            values |= {f"{'served_' if why else ''}{name}": value for name, value in sent.items()}
            reasons |= dict.fromkeys(("transfer_bytes", "transfer_s"), why) if why else {}
        if self._choice is not None and self._shape is not None:
            answers = [answer for answer in served.answers if answer.first_s is not None]
            of_load = by_users(served_levels(answers, self._choice.levels, self._shape))
            values |= of_load | within_slo(answers, self._choice.slo)
            other = f"fewer than {LEAST_ANSWERS} answers of such lengths were given while so many requests were in flight."
            reasons |= {name: other for name in by_users(self._choice.levels) if name not in of_load}
        self._run.measure(values, "partial", reasons)

    def stopped(self, totals: Mapping[str, float]) -> None:
        self._run.measure({f"served_{name}": value for name, value in totals.items()})
