"""Predicts a batch before it is computed: some of its requests are read, and the scheduler is simulated with their lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.policy import PAGE_TOKENS
from twostroke.core.sampling_kinds import SAMPLING_KINDS
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.adapters import adapters_in
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.under_load import Server
from twostroke.planner.serving.workload import Arrival, Workload
from twostroke.planner.truth.drafts import drafts_seen
from twostroke.planner.truth.recording import Planned
from twostroke.quantization.held import serving_shape
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.admission import Admission
from twostroke.server.batch.lines import BatchInput, Marks
from twostroke.server.batch.runner import begun
from twostroke.server.engine_client import EngineClient
from twostroke.server.errors import ApiError
from twostroke.server.launch import EngineChild
from twostroke.server.service import Service
from twostroke.server.text import ModelText
from twostroke.server.token_stream import TokenStream

MOST_SAMPLED = 200
"""Requests that are read to predict all, evenly spaced: their mean lengths are then known within a few percent."""
MOST_SIMULATED = 1000
"""Prompts that are simulated: a longer batch goes on as it went."""


@dataclass(frozen=True)
class Asked:
    """One prompt of a request. ``output_tokens`` is the most that each of its ``answers`` may have; 0: it is only scored."""

    prompt_ids: list[int]
    output_tokens: int
    answers: int
    kinds: tuple[str, ...]


class _Noting(EngineClient):
    """Notes what an engine would be asked for, and computes nothing."""

    def __init__(self, longest: int, adapters: Mapping[str, str]) -> None:
        super().__init__(_no_engine, adapters=adapters)
        self.info = wire.Ready("", longest, PAGE_TOKENS, 0, 0, 0.0)
        self.asked: list[Asked] = []

    @property
    def ready(self) -> bool:
        return True

    def submit(
        self, prompt_ids: list[int], params: SamplingParams, wake: asyncio.Event, *rest: Any, **named: Any
    ) -> list[TokenStream]:
        scored = params.prompt_logprobs is not None and params.max_tokens == 1
        self.asked.append(Asked(prompt_ids, 0 if scored else params.max_tokens, params.beam_width, params.kinds))
        return [TokenStream(self, "", i, wake) for i in range(params.n)]


def _no_engine() -> EngineChild:
    raise ConfigError("no engine is started to look at requests.")


async def asked_of(
    given: BatchInput, places: Sequence[int], text: ModelText, spec: ModelSpec, names: tuple[str, ...], longest: int,
    adapters: Mapping[str, str],
) -> list[Asked]:  # fmt: skip
    """The prompts of the requests at ``places``, read as they will be. Those that will be refused ask for nothing."""
    client = _Noting(longest, adapters)
    service = Service(client, text, spec, names, Admission(2**31))
    for i in places:
        request = given.request(i)
        try:
            answer = await begun(service, request, Marks.of("", request.custom_id))
        except ApiError:
            continue
        answer.generation.close()
    return client.asked


def sampled(places: Sequence[int]) -> list[int]:
    """Some of ``places``, evenly spaced."""
    n = min(len(places), MOST_SAMPLED)
    return [places[i * len(places) // n] for i in range(n)]


def shared_prefix(prompts: Sequence[list[int]]) -> int:
    """Tokens with which all of ``prompts`` begin: those that the least and the greatest have in common."""
    least, greatest = min(prompts), max(prompts)
    differ = (i for i, (a, b) in enumerate(zip(least, greatest, strict=False)) if a != b)
    return next(differ, min(len(least), len(greatest)))


def predict_batch(
    directory: Path, spec: ModelSpec, settings: EngineSettings, asked: Sequence[Asked], share: float, n_requests: int,
    at_once: int, adapters: Sequence[Path],
) -> Planned:  # fmt: skip
    """Time, rates and money of ``n_requests``, of which ``asked`` are the prompts of a ``share``, all of whose answers are as
    long as they may be. Raises ConfigError, and the errors of a plan."""
    if not asked:
        raise ConfigError("none of the requests that were looked at can be computed.")
    hardware = load_hardware("this", "serve")
    n_prompts = max(1, round(len(asked) / share))
    n = min(n_prompts, MOST_SIMULATED)
    writing = [each.output_tokens for each in asked if each.output_tokens]
    kinds = {kind for each in asked for kind in each.kinds}
    answers = max(each.answers for each in asked)
    shape = serving_shape(
        directory,
        spec,
        settings,
        batch=answers * max(1, min(n_prompts, settings.max_running) // answers),
        answers=answers,
        prompt_tokens=max(1, round(sum(len(each.prompt_ids) for each in asked) / len(asked))),
        output_tokens=max(1, round(sum(writing) / max(1, len(writing)))),
        sampling=tuple(kind for kind in SAMPLING_KINDS if kind in kinds),
        speculation=drafts_seen(directory, settings.speculate),
        adapters=adapters_in(adapters),
    )
    shared = shared_prefix([each.prompt_ids for each in asked]) if len(asked) > 1 else 0
    blocks = (0,) if shared >= PAGE_TOKENS else ()
    arrivals = tuple(
        Arrival(0.0, len(each.prompt_ids), max(1, each.output_tokens), blocks, each.answers)
        for each in (asked[i % len(asked)] for i in range(n))
    )
    found = Server(plan_serving(spec, shape, hardware)).serve(
        Workload(arrivals, cap=at_once, block_tokens=shared if blocks else PAGE_TOKENS)
    )
    elapsed_s = found.duration_s * n_prompts / n
    values = {"elapsed_s": elapsed_s, "requests_per_s": n_requests / elapsed_s}
    if writing:
        values["output_tok_per_s"] = found.output_tok_per_s * sum(writing) / sum(max(1, each.output_tokens) for each in asked)
    return Planned(values, hardware, {"shape": vars(shape), "shared_prefix_tokens": shared})
