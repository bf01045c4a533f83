"""Measures what HTTP adds to the engine: a small model served and loaded by the package's own commands, beside the same engine
called directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from twostroke.calibration.serving_steps import Engines, Prompts, prefill_step_s, write_tokenizer
from twostroke.calibration.timing import Clock
from twostroke.calibration.transformer import straight_line
from twostroke.core.rates import HttpRates
from twostroke.planner.hardware.anchors import anchor_spec

FEW_USERS, MANY_USERS = 1, 4
PROMPT, OUTPUT, REQUESTS, ROUNDS = 32, 48, 48, 2
FULL_USERS, SHORT_OUTPUT, FULL_REQUESTS = 8, 2, 160
"""A load that keeps the HTTP process busy with requests: what one more takes is what it does for it."""

WIDTH, LAYERS, VOCABULARY = 128, 1, 8192
SCHEME = "bf16"
TIMEOUT_S = 60.0


def measure_http(clock: Clock) -> HttpRates | None:
    """HTTP's share of the first token, and of the time between tokens at two numbers of users: medians of ``REQUESTS`` requests
    less the engine's own time, in ``ROUNDS`` loads. The engine's steps are those that the server counted in the same load,
    because a machine's speed may change before another. Handling a request takes what one more of them takes where answers are
    short and the HTTP process is never idle. None if the server cannot run here."""
    with tempfile.TemporaryDirectory(prefix="twostroke-http-") as folder:
        place, prompts = Path(folder), Prompts()
        engines = Engines(place)
        engine = engines.get(anchor_spec(WIDTH, LAYERS, VOCABULARY, WIDTH // 128), SCHEME)
        directory = engines.directory(engine.spec)
        write_tokenizer(directory, VOCABULARY)
        prefill_s = prefill_step_s(clock, engine, prompts, PROMPT)
        del engine, engines
        try:
            loads = ((FEW_USERS, OUTPUT, REQUESTS), (MANY_USERS, OUTPUT, REQUESTS), (FULL_USERS, SHORT_OUTPUT, FULL_REQUESTS))
            few, many, full = ([_served(directory, load, place / "home") for _ in range(ROUNDS)] for load in loads)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError):
            return None
    beyond = [max(0.0, median(one["tpot_s"] - one["decode_step_s"] for one in rounds)) for rounds in (few, many)]
    step_s, answer_s = straight_line(FEW_USERS, MANY_USERS, *beyond)
    request_s = max(0.0, median(one["ttft_s"] for one in few) - prefill_s)
    start_s = min(one["startup_s"] for one in (*few, *many, *full))
    handling_s = 1 / median(one["requests_per_s"] for one in full)
    idle_s = max(0.0, median(one["prefill_s"] for one in (*few, *many)) - prefill_s)
    return HttpRates(request_s, max(0.0, step_s), max(0.0, answer_s), start_s, handling_s, idle_s)


def _served(directory: Path, load: tuple[int, int, int], home: Path) -> dict[str, float]:
    """Medians of a closed loop of so many users, tokens an answer and requests, on a server of its own with the ledger of
    ``home``. Raises OSError, ValueError, KeyError or SubprocessError if the server cannot run, or answers nothing."""
    users, output, requests = load
    lengths = ["--prompt-tokens", str(PROMPT), "--output-tokens", str(output), "--requests", str(requests)]
    command = [sys.executable, "-P", "-m", "twostroke.cli.main", "bench", "serve", str(directory), "--json", *lengths]
    command += ["--users", str(users), "--dtype", SCHEME]
    environment = os.environ | {"TWOSTROKE_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
    document = json.loads(done.stdout)
    found = document["measurement"] | {"startup_s": document["server"]["startup_s"]}
    names = ("ttft_s", "tpot_s", "prefill_s", "decode_step_s", "requests_per_s", "startup_s")
    return {name: found[name] for name in names}
