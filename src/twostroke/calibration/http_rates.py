"""Measures what HTTP adds to the engine: a small model served and loaded by the package's own commands, beside the same engine
called directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from twostroke.calibration.serving_steps import Engines, Prompts, prefill_step_s, write_tokenizer
from twostroke.calibration.timing import Clock
from twostroke.calibration.transformer import straight_line
from twostroke.core.rates import HttpRates
from twostroke.planner.hardware.anchors import anchor_spec
from twostroke.planner.serving.http import FrontEnd
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.workload import Workload

FEW_USERS, MANY_USERS = 1, 4
PROMPT, OUTPUT, REQUESTS, ROUNDS = 32, 48, 48, 3
HALVINGS = 12

WIDTH, LAYERS, VOCABULARY = 128, 1, 8192
SCHEME = "bf16"
TIMEOUT_S = 60.0


def measure_http(clock: Clock) -> HttpRates | None:
    """HTTP's share of the first token, and of the time between tokens at two numbers of users: medians of ``REQUESTS`` requests
    less the engine's own time, in ``ROUNDS`` loads. The engine's steps are those that the server counted in the same load,
    because a machine's speed may change before another. Handling a request takes what makes first tokens at the larger number
    of users as late in a simulation of the load as they were. None if the server cannot run here."""
    with tempfile.TemporaryDirectory(prefix="twostroke-http-") as folder:
        place, prompts = Path(folder), Prompts()
        engines = Engines(place)
        engine = engines.get(anchor_spec(WIDTH, LAYERS, VOCABULARY, WIDTH // 128), SCHEME)
        directory = engines.directory(engine.spec)
        write_tokenizer(directory, VOCABULARY)
        prefill_s = prefill_step_s(clock, engine, prompts, PROMPT)
        del engine, engines
        try:
            few, many = ([_served(directory, n, place / "home") for _ in range(ROUNDS)] for n in (FEW_USERS, MANY_USERS))
        except (OSError, ValueError, KeyError, subprocess.SubprocessError):
            return None
    beyond = [max(0.0, median(one["tpot_s"] - one["decode_step_s"] for one in rounds)) for rounds in (few, many)]
    step_s, answer_s = straight_line(FEW_USERS, MANY_USERS, *beyond)
    request_s = max(0.0, median(one["ttft_s"] for one in few) - prefill_s)
    start_s = min(one["startup_s"] for one in (*few, *many))
    tpot_s = straight_line(FEW_USERS, MANY_USERS, *(median(one["tpot_s"] for one in rounds) for rounds in (few, many)))
    handling_s = _handling_s(median(one["ttft_s"] for one in many), request_s, prefill_s, tpot_s)
    idle_s = max(0.0, median(one["prefill_s"] for one in (*few, *many)) - prefill_s)
    return HttpRates(request_s, max(0.0, step_s), max(0.0, answer_s), start_s, handling_s, idle_s)


def _handling_s(ttft_s: float, request_s: float, prefill_s: float, step: tuple[float, float]) -> float:
    """The part of ``request_s`` in which a request holds up others, so that ``MANY_USERS`` wait ``ttft_s`` (median) for a first
    token. ``step``: seconds of a decode step, and more for each request in it."""

    def seconds(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        return len(chunks) * prefill_s + (step[0] + decoding * step[1] if decoding else 0.0)

    users = Workload.closed(MANY_USERS, REQUESTS, PROMPT, OUTPUT, turnaround_s=0.0)
    least, most = 0.0, request_s
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        found = simulate(users, policy_of("twostroke"), seconds, REQUESTS * OUTPUT, front=FrontEnd(middle, request_s - middle))
        least, most = (least, middle) if found.ttft_s.median > ttft_s else (middle, most)
    return (least + most) / 2


def _served(directory: Path, users: int, home: Path) -> dict[str, float]:
    """Medians of a closed loop of ``users`` on a server of its own with the ledger of ``home``. Raises OSError, ValueError,
    KeyError or SubprocessError if the server cannot run, or answers nothing."""
    lengths = ["--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT), "--requests", str(REQUESTS)]
    command = [sys.executable, "-P", "-m", "twostroke.cli.main", "bench", "serve", str(directory), "--json", *lengths]
    command += ["--users", str(users), "--dtype", SCHEME]
    environment = os.environ | {"TWOSTROKE_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
    document = json.loads(done.stdout)
    found = document["measurement"] | {"startup_s": document["server"]["startup_s"]}
    names = ("ttft_s", "tpot_s", "prefill_s", "decode_step_s", "startup_s")
    return {name: found[name] for name in names}
