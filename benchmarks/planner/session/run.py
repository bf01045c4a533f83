"""README's session and the demo, typed as a new user would, and what each prediction was worth.

    python benchmarks/planner/session/run.py --out benchmarks/planner/session/runs/<date>-<machine>-<commit>

Begins in an empty home, so the first command calibrates. Every command freezes its prediction and measures itself; the numbers
are read from the ledger that this leaves. About fifteen minutes on two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(BENCHMARKS / "session"), str(BENCHMARKS), str(ROOT / "src")]

import recorded  # noqa: E402
from commands import SESSION  # noqa: E402
from headlines import found_in, summary  # noqa: E402

CALIBRATE = "twostroke calibrate"
BESIDE = (  # what README names and its session does not type
    "twostroke train recipes/lora.toml",
    "twostroke eval runs/quick",
    "twostroke compare runs/quick runs/quick-int8",
    "twostroke bench offline runs/quick-int8 --batch 1 --batch 8",
)


def commands(budget_s: float) -> list[str]:
    """Everything that is typed, in order. ``make demo`` trains 300 seconds; ``budget_s`` 0 leaves the demo out."""
    demo = [f"twostroke demo --budget-s {budget_s:g}"] if budget_s else []
    return [*(command for command, _ in SESSION), *BESIDE, *demo]


def typed(command: str, work: Path, environment: dict[str, str]) -> str:
    """What ``command`` printed. Raises SystemExit with its errors if it fails."""
    arguments = [sys.executable, "-m", "twostroke", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command} exited with {done.returncode}:\n{done.stderr}")
    return recorded.without_folders(done.stdout)


@contextmanager
def one_core_taken() -> Iterator[None]:
    """Another program that computes on one core without a pause."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


@contextmanager
def nothing() -> Iterator[None]:
    yield


def round_of(work: Path, environment: dict[str, str], to_type: list[str], disturbed: str) -> list[dict[str, Any]]:
    """Types every command in ``work``: its output, time, load before, and the ledger's runs that it made."""
    from twostroke.ledger.store import Ledger

    shutil.copytree(ROOT / "recipes", work / "recipes")
    ledger, steps = Ledger(Path(environment["TWOSTROKE_HOME"]) / "ledger.sqlite"), []
    for command in to_type:
        is_beside = disturbed == "always" or (disturbed == "after-calibration" and command != CALIBRATE)
        known = {run.run_id for run in ledger.runs()}
        with one_core_taken() if is_beside else nothing():
            load, began = os.getloadavg()[0], time.monotonic()
            printed = typed(command, work, environment)
            took_s = time.monotonic() - began
        made = [run for run in reversed(ledger.runs()) if run.run_id not in known]
        found = [row for run in made for row in found_in(command, run)]
        steps.append({"command": command, "took_s": took_s, "load_before": load, "stdout": printed, "found": found})
        print(f"{took_s:7.1f} s  {command}", file=sys.stderr, flush=True)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Folder of this run's results.")
    parser.add_argument("--budget-s", type=float, default=300.0, help="Seconds of the demo's training; 0 leaves the demo out.")
    parser.add_argument("--rounds", type=int, default=1, help="Type everything but calibrate so often: shows what repeats.")
    parser.add_argument("--home", type=Path, help="Copy this calibrated home and leave calibrating out.")
    parser.add_argument("--work", type=Path, help="Folder to work in, kept. Default: a temporary one, removed.")
    parser.add_argument(
        "--disturbed", nargs="?", const="always", default="never", choices=("never", "always", "after-calibration"),
        help="Beside another program that takes one core, from the beginning or only after calibrating.",
    )  # fmt: skip
    given = parser.parse_args()
    from twostroke.kernels.native_library import why_absent

    if absent := why_absent():  # a user of `make demo` has it, and without it other engines are measured
        raise SystemExit(f"The session is of an engine with its native library, which is absent: {absent}")
    given.out.mkdir(parents=True, exist_ok=True)
    to_type = commands(given.budget_s)
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).resolve()
        home = work / "home"
        if given.home is not None:
            shutil.copytree(given.home / "profiles", home / "profiles")
            to_type.remove(CALIBRATE)
        environment = os.environ | {"TWOSTROKE_HOME": str(home), "PYTHONPATH": str(ROOT / "src")}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(work / "compiled")}  # a new user has compiled nothing
        rounds = []
        for number in range(given.rounds):
            folder = work / f"round-{number + 1}"
            folder.mkdir(parents=True)
            rounds.append(round_of(folder, environment, [c for c in to_type if number == 0 or c != CALIBRATE], given.disturbed))
        os.environ["TWOSTROKE_HOME"] = str(home)
        record = {"command": recorded.command(), **_versions(), "disturbed": given.disturbed, "rounds": rounds}
    found = [[row for step in steps for row in step["found"]] for steps in rounds]
    text = summary(found, given.disturbed)
    plain = [[step | {"found": [asdict(row) for row in step["found"]]} for step in steps] for steps in rounds]
    recorded.write(given.out, {"session.json": record | {"rounds": plain}, "summary.md": text})
    print(text)


def _versions() -> dict[str, Any]:
    import torch

    from twostroke.core.profile import load_profile, read_fingerprint
    from twostroke.ledger.code_version import code_version

    profile = load_profile("serve")
    return {
        "code": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": asdict(read_fingerprint()),
        "profile": asdict(profile) if profile else None,
    }


if __name__ == "__main__":
    main()
