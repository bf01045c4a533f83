"""Measures what HTTP adds to the engine: a small model served and loaded by the package's own commands, beside the same engine
called directly."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from twostroke.calibration.serving_steps import Engines, Prompts, decode_step_s, prefill_step_s, write_tokenizer
from twostroke.calibration.timing import Clock
from twostroke.calibration.transformer import straight_line
from twostroke.core.rates import HttpRates
from twostroke.planner.hardware.anchors import anchor_spec
from twostroke.planner.serving.http import FrontEnd, requests_beside_a_step
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.workload import Workload

log = logging.getLogger("twostroke.calibration")

FEW_USERS, MANY_USERS = 1, 4
PROMPT, OUTPUT, REQUESTS, ROUNDS = 32, 48, 48, 3
HALVINGS = 12
BUSIEST = 0.9
"""Most of a step in which the front end may be taken to hand on its tokens."""

TINY, WIDER, VOCABULARY = (128, 1), (256, 8), 8192
"""(width, layers) of the model whose steps run on one thread and of the one whose steps run on all."""

LONG_PROMPT = 256
"""Tokens of a prompt whose handling takes visibly longer than that of ``PROMPT``."""

CROWD = 16
"""Users of the wider model: so many that what HTTP takes of its steps is more than what a step differs by from second to
second."""

SHORT_OUTPUT = 12
"""Tokens of an answer in a load of the same crowd in which requests come more often."""

SCHEME = "bf16"
TIMEOUT_S = 60.0
TRIES = 2
"""Of a load. One that fails would take all that was measured over HTTP with it."""

_FAILURES = (OSError, ValueError, KeyError, subprocess.SubprocessError)
"""What a server or a load that cannot run here raises."""


@dataclass(frozen=True)
class _Load:
    """Medians of a closed loop, in seconds; ``alone_s`` and ``alone_prefill_s`` are the engine's decode step and a prompt's
    without HTTP, right before."""

    ttft_s: float
    tpot_s: float
    prefill_s: float
    decode_step_s: float
    itl_p90_s: float
    itl_p95_s: float
    itl_p99_s: float
    startup_s: float
    alone_s: float = 0.0
    alone_prefill_s: float = 0.0

    @property
    def before_s(self) -> float:
        """What comes before the first token beside the prompt's own step, as the server counted that."""
        return self.ttft_s - self.prefill_s


def measure_http(clock: Clock, rounds: int = ROUNDS) -> HttpRates | None:
    """HTTP's share of the first token, and of the time between tokens at two numbers of users: medians of ``REQUESTS``
    requests less the engine's own time, in ``rounds`` loads. The engine's steps are those that the server counted in the
    same load, because a machine's speed may change before another. Handling a request, and a token, takes what makes first
    tokens at the larger number of users as late in a simulation of the load as they were. Steps on all threads share their
    processors with HTTP: a wider model's steps are compared with the same steps without it, of one user, of a crowd, and of
    a crowd whose answers are short, and its first tokens with those of the smaller one. A longer prompt shows what each
    token adds. None if the server cannot run here."""
    with tempfile.TemporaryDirectory(prefix="twostroke-http-") as folder:
        place = Path(folder)
        tiny, wider = (_Served(clock, place, *size) for size in (TINY, WIDER))
        try:
            few, many = ([tiny.load(n) for _ in range(rounds)] for n in (FEW_USERS, MANY_USERS))
            long = [tiny.load(FEW_USERS, prompt=LONG_PROMPT) for _ in range(rounds)]
            threads = torch.get_num_threads()
            loads = ((FEW_USERS, OUTPUT), (CROWD, OUTPUT), (CROWD, SHORT_OUTPUT))
            beside = [[wider.load(n, threads, output) for _ in range(rounds)] for n, output in loads]
        except _FAILURES as error:
            log.warning(
                "HTTP was not measured (%s: %s): plans of a server count the engine alone.", type(error).__name__, error
            )
            return None
        prefill_s = tiny.prefill_s
    beyond = [max(0.0, median(one.tpot_s - one.decode_step_s for one in rounds)) for rounds in (few, many)]
    step_s, answer_s = straight_line(FEW_USERS, MANY_USERS, *beyond)
    tpot_s = straight_line(FEW_USERS, MANY_USERS, *(median(one.tpot_s for one in rounds) for rounds in (few, many)))
    request_s = max(0.0, median(one.ttft_s for one in few) - prefill_s)
    more_s = median(one.before_s for one in long) - median(one.before_s for one in few)
    prompt_token_s = min(max(0.0, more_s / (LONG_PROMPT - PROMPT)), request_s / PROMPT)
    prompt_s = PROMPT * prompt_token_s
    first_s = median(one.ttft_s - one.alone_prefill_s for one in beside[0])
    front = _front_end(median(one.ttft_s for one in many), request_s, prefill_s, tpot_s)
    found = [median(one.decode_step_s - one.alone_s for one in rounds) for rounds in beside]
    sharing = _sharing(*found, most_s=request_s)
    return HttpRates(
        request_s - prompt_s,
        max(0.0, step_s),
        max(0.0, answer_s),
        start_s=median(one.startup_s for one in (*few, *many)),
        handling_s=max(0.0, front.handling_s - prompt_s),
        token_s=front.token_s,
        idle_s=max(0.0, median(one.prefill_s for one in (*few, *many)) - prefill_s),
        shared_answer_s=sharing.answer_s,
        shared_step_s=sharing.step_s,
        shared_request_s=sharing.request_s,
        prompt_token_s=prompt_token_s,
        shared_first_s=max(0.0, first_s - request_s),
        late_shares=_late_shares(few),
    )


def _late_shares(loads: Sequence[_Load]) -> tuple[float, ...]:
    """By what share of a step a token comes later than most at 90, 95 and 99% of the gaps: medians of ``loads``. One whose
    tokens came all at once, because other programs held the client up, has no step to be a share of."""
    paced = [load for load in loads if load.tpot_s > 0]
    gaps = [[one / load.tpot_s for one in (load.itl_p90_s, load.itl_p95_s, load.itl_p99_s)] for load in paced]
    return tuple(max(0.0, median(at) - 1.0) for at in zip(*gaps, strict=True)) or HttpRates.late_shares


class _Sharing(NamedTuple):
    """What HTTP takes of steps on all threads: of each, for each answer in it, for each request handled meanwhile."""

    step_s: float
    answer_s: float
    request_s: float


def _sharing(alone_s: float, crowd_s: float, short_s: float, *, most_s: float) -> _Sharing:
    """From what a step takes longer beside HTTP with one user, with ``CROWD``, and with as many whose answers are short. Only
    the requests differ between the last two, and nobody asks during a step of one user. With the result
    ``planner.serving.http.step_sharing_s`` gives the three back, as far as no part would be below 0, and
    a request's no more than ``most_s``, all that HTTP does for one."""
    often, seldom = (requests_beside_a_step(CROWD, output) for output in (SHORT_OUTPUT, OUTPUT))
    request_s = min(most_s, max(0.0, (short_s - crowd_s) / (often - seldom)))
    crowd_s = max(0.0, crowd_s - seldom * request_s)
    slope_s = (crowd_s - alone_s) / (CROWD - FEW_USERS)
    step_s = max(0.0, min(alone_s, alone_s - FEW_USERS * slope_s))
    return _Sharing(step_s, max(0.0, crowd_s - step_s) / CROWD, request_s)


def _front_end(ttft_s: float, request_s: float, prefill_s: float, step: tuple[float, float]) -> FrontEnd:
    """One in which ``MANY_USERS`` wait ``ttft_s`` (median) for a first token, as they were found to. If all of ``request_s``
    would make them wait longer, only a part of it holds up others; if not, their tokens do, too. ``step``: seconds of a decode
    step, and more for each request in it."""

    def seconds(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        return len(chunks) * prefill_s + (step[0] + decoding * step[1] if decoding else 0.0)

    def waited_s(front: FrontEnd) -> float:
        found = simulate(users, policy_of("twostroke"), seconds, REQUESTS * OUTPUT, front=front)
        return found.ttft_s.median

    users = Workload.closed(MANY_USERS, REQUESTS, PROMPT, OUTPUT, turnaround_s=0.0)
    whole = FrontEnd(request_s, 0.0)
    is_part = waited_s(whole) > ttft_s
    least, most = 0.0, request_s if is_part else BUSIEST * seconds(MANY_USERS, 0.0, ()) / MANY_USERS
    found = whole
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        found = FrontEnd(middle, request_s - middle) if is_part else whole._replace(token_s=middle)
        least, most = (least, middle) if waited_s(found) > ttft_s else (middle, most)
    return found


class _Served:
    """A random model of ``width`` and ``n_layers`` in ``place``, reached directly and by HTTP."""

    def __init__(self, clock: Clock, place: Path, width: int, n_layers: int) -> None:
        self._clock, self._home, self._prompts = clock, place / "home", Prompts()
        engines, spec = Engines(place, in_server=True), anchor_spec(width, n_layers, VOCABULARY, width // 128)
        self._engine, self._directory = engines.get(spec, SCHEME), engines.directory(spec)
        write_tokenizer(self._directory, VOCABULARY)
        self.prefill_s = prefill_step_s(clock, self._engine, self._prompts, PROMPT)

    def load(self, users: int, n_threads: int | None = None, output: int = OUTPUT, prompt: int = PROMPT) -> _Load:
        """A closed loop of ``users`` on a server of its own, with ``n_threads`` (None: as the engine chooses), and prompts and
        answers of ``prompt`` and ``output`` tokens. Raises one of ``_FAILURES`` if the server cannot run, or answers
        nothing, ``TRIES`` times."""
        alone_s = alone_prefill_s = 0.0
        if n_threads is not None:
            self._engine.settings = replace(self._engine.settings, n_threads=n_threads)
            alone_s = decode_step_s(self._clock, self._engine, self._prompts, users, prompt + output // 2)
            alone_prefill_s = prefill_step_s(self._clock, self._engine, self._prompts, prompt)
        lengths = ["--prompt-tokens", str(prompt), "--output-tokens", str(output)]
        lengths += ["--requests", str(REQUESTS * OUTPUT // output)]
        command = [sys.executable, "-P", "-m", "twostroke", "bench", "serve", str(self._directory), "--json", *lengths]
        command += ["--users", str(users), "--dtype", SCHEME]
        command += [] if n_threads is None else ["--threads", str(n_threads)]
        for _ in range(TRIES - 1):
            with contextlib.suppress(*_FAILURES):
                return self._run(command, alone_s, alone_prefill_s)
        return self._run(command, alone_s, alone_prefill_s)

    def _run(self, command: list[str], alone_s: float, alone_prefill_s: float) -> _Load:
        environment = os.environ | {"TWOSTROKE_HOME": str(self._home)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
        document = json.loads(done.stdout)
        found = document["measurement"] | {"startup_s": document["server"]["startup_s"]}
        found |= {"alone_s": alone_s, "alone_prefill_s": alone_prefill_s}
        return _Load(**{field.name: found[field.name] for field in fields(_Load)})
