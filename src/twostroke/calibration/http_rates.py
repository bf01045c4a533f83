"""Measures what HTTP adds to the engine: a small model served and loaded by the package's own commands, beside the same engine
called directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twostroke.calibration.serving_steps import Engines, Prompts, decode_step_s, prefill_step_s
from twostroke.calibration.timing import Clock
from twostroke.calibration.transformer import straight_line
from twostroke.core.rates import HttpRates
from twostroke.planner.hardware.anchors import anchor_spec

FEW_USERS, MANY_USERS = 1, 4
PROMPT, OUTPUT, REQUESTS = 32, 48, 24
WIDTH, LAYERS, VOCABULARY = 256, 2, 8192
SCHEME = "bf16"
TIMEOUT_S = 60.0


def measure_http(clock: Clock) -> HttpRates | None:
    """HTTP's share of the first token at one user, and of the time between tokens at two numbers of users: medians of
    ``REQUESTS`` requests less the engine's own time, threads that wait for each other's processor included. None if the server
    cannot run here."""
    with tempfile.TemporaryDirectory(prefix="twostroke-http-") as folder:
        place, prompts = Path(folder), Prompts()
        engines = Engines(place)
        engine = engines.get(anchor_spec(WIDTH, LAYERS, VOCABULARY, WIDTH // 128), SCHEME)
        directory = engines.directory(engine.spec)
        _write_tokenizer(directory)
        context = PROMPT + OUTPUT // 2
        steps = [decode_step_s(clock, engine, prompts, users, context) for users in (FEW_USERS, MANY_USERS)]
        prefill_s = prefill_step_s(clock, engine, prompts, PROMPT)
        del engine, engines
        served = [_served(directory, users, place / "home") for users in (FEW_USERS, MANY_USERS)]
    if served[0] is None or served[1] is None:
        return None
    beyond = [max(0.0, one["tpot_s"] - step_s) for one, step_s in zip(served, steps, strict=True) if one is not None]
    step_s, answer_s = straight_line(FEW_USERS, MANY_USERS, *beyond)
    start_s = min(one["startup_s"] for one in served if one is not None)
    return HttpRates(max(0.0, served[0]["ttft_s"] - prefill_s), max(0.0, step_s), max(0.0, answer_s), start_s)


def _served(directory: Path, users: int, home: Path) -> dict[str, float] | None:
    """Medians of a closed loop of ``users`` on a server of its own. Its ledger is ``home``'s, which goes with the folder."""
    lengths = ["--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT), "--requests", str(REQUESTS)]
    command = [sys.executable, "-P", "-m", "twostroke.cli.main", "bench", "serve", str(directory), "--json", *lengths]
    command += ["--users", str(users), "--dtype", SCHEME]
    environment = os.environ | {"TWOSTROKE_HOME": str(home)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
        document = json.loads(done.stdout)
        measured: dict[str, float] = document["measurement"] | {"startup_s": document["server"]["startup_s"]}
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return None
    return measured if {"ttft_s", "tpot_s"} <= measured.keys() else None


def _write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: every byte of a prompt is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
