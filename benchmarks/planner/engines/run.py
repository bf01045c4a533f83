"""Freezes a prediction for every configuration, runs it with the real engines, and scores the one against the other.

    python benchmarks/planner/engines/run.py --work WORK --out benchmarks/planner/engines/runs/<date>-<machine>-<commit>

Uses the profile of ``twostroke calibrate`` in ``TWOSTROKE_HOME``; ``--calibrate`` makes one. Interrupted, it goes on where
it stopped: every finished configuration is a line of ``raw.jsonl``. ``--pairs`` measures all of them a second time, after all
others, so that each has its own repeatability.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import recorded  # noqa: E402
from configurations import SERVING, TRAINING, ServingCase, TrainingCase  # noqa: E402
from models import model_directory, recipe_of, served_directory  # noqa: E402
from score import summary  # noqa: E402

TRIES = 2
MOST_DISTURBED = 0.34
"""A run of whose steps more were disturbed is repeated, up to ``TRIES`` times, and the least disturbed one is kept."""

TRAIN_SECONDS = 5.0
LEAST_STEPS, MOST_STEPS = 10, 40

REQUESTS = 48
"""Of a load over HTTP."""

TRANSFORMERS = "weights_bytes_in_transformers"
"""The same prediction as ``weights_bytes``, held against what transformers takes for the model."""

SCORED = {
    "train": (
        "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "checkpoint_bytes", "model_bytes",
        "peak_memory_bytes", "step_time_s", "forward_s", "backward_s", "optimizer_s", "train_tok_per_s",
    ),
    "serve": ("weights_bytes", TRANSFORMERS, "kv_cache_bytes", "ttft_s", "tpot_s", "prefill_tok_per_s", "decode_tok_per_s"),
    "http": (
        "ttft_s", "ttft_p90_s", "ttft_p99_s", "tpot_s", "tpot_p90_s", "itl_p90_s", "itl_p99_s", "e2e_s", "prefill_s",
        "decode_step_s", "output_tok_per_s", "concurrency", "startup_s", "warm_startup_s",
    ),
}  # fmt: skip
"""Start-up and run time of training depend on how warm the compile cache is: they are in the raw data and not scored."""


def _run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE, timeout=1200, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def _steps(recipe: Path) -> int:
    """So many that they take ``TRAIN_SECONDS`` if the prediction is right."""
    from twostroke.core.recipe import read_recipe
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.training.plan import plan_training
    from twostroke.planner.training.shape import TrainingShape

    parsed = read_recipe(recipe)
    shape = TrainingShape.from_settings(parsed.train)
    plan = plan_training(_spec_of(parsed), shape, load_hardware("this", "train"))
    return max(LEAST_STEPS, min(MOST_STEPS, round(TRAIN_SECONDS / plan.step_time_s)))


def _spec_of(recipe: Any) -> Any:
    from twostroke.core.families import read_spec
    from twostroke.core.recipe import spec_from_recipe

    if recipe.model.init_from is not None:
        return read_spec(recipe.model.init_from)
    return spec_from_recipe(recipe.model, recipe.data.vocab_size, recipe.train.sequence_length)


def train(case: TrainingCase, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    recipe = recipe_of(case, folder)
    output = folder / "runs" / f"{case.name}-{time.time_ns()}"
    command = [sys.executable, "train_one.py", str(recipe), f"train.steps={_steps(recipe)}", f"output={output}"]
    # A first run is planned: a process that compiles holds 25 MB more than one that finds what another has compiled.
    with tempfile.TemporaryDirectory() as compiled:
        return _run(command, environment | {"TORCHINDUCTOR_CACHE_DIR": compiled})


def serve(case: ServingCase, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    from twostroke.core.paths import model_directory as of_run

    directory = of_run(served_directory(case, folder, environment))
    if case.over_http:
        return _over_http(case, directory, environment)
    described = json.dumps(dataclasses.asdict(case) | {"name": case.name})
    return _run([sys.executable, "serve_one.py", str(directory), described], environment)


def _over_http(case: ServingCase, directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    """`twostroke bench serve`, and of the server's own run what starting took. Its predictions join the load's."""
    from twostroke.ledger.store import Ledger

    command = [sys.executable, "-m", "twostroke", "bench", "serve", str(directory), "--json", "--dtype", case.scheme]
    command += ["--users", str(case.batch), "--requests", str(REQUESTS), "--prompt-tokens", str(case.prompt_tokens)]
    command += ["--output-tokens", str(case.output_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=True)
    found = json.loads(done.stdout)
    server = Ledger().get(found["server"]["run_id"])
    starts = {name: value for name, value in server.measurement.items() if name.endswith("startup_s")}
    predicted = {name: value for name, value in server.prediction.items() if name.endswith("startup_s")}
    return {"run_id": found["run_id"], "measured": found["measurement"] | starts, "also": predicted, "disturbed_share": 0.0}


@lru_cache
def _transformers_bytes(directory: str, dtype: str) -> float:
    command = [sys.executable, "transformers_size.py", directory, dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=300, check=True)
    return float(done.stdout.split()[-1])


def _done(raw: Path) -> dict[tuple[str, int], dict[str, Any]]:
    if not raw.is_file():
        return {}
    records = map(json.loads, raw.read_text(encoding="utf-8").splitlines())
    return {(record["name"], record["round"]): record for record in records}


def phase_of(case: TrainingCase | ServingCase) -> str:
    if isinstance(case, TrainingCase):
        return "train"
    return "http" if case.over_http else "serve"


def chosen(pattern: str) -> Iterator[tuple[str, TrainingCase | ServingCase]]:
    """(phase, case) of those whose "phase/name" ``pattern`` is found in."""
    for case in (*TRAINING, *SERVING):
        phase = phase_of(case)
        if re.search(pattern, f"{phase}/{case.name}"):
            yield phase, case


def measured(phase: str, case: TrainingCase | ServingCase, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The least disturbed of up to ``TRIES`` runs of ``case``, with what was predicted."""
    from twostroke.ledger.store import Ledger

    best: dict[str, Any] | None = None
    for _ in range(TRIES):
        began = time.time()
        one = train(case, folder, environment) if isinstance(case, TrainingCase) else serve(case, folder, environment)
        one["wall_s"] = time.time() - began
        if best is None or one["disturbed_share"] < best["disturbed_share"]:
            best = one
        if best["disturbed_share"] <= MOST_DISTURBED:
            break
    assert best is not None
    predicted = Ledger().get(best["run_id"]).prediction | best.pop("also", {})
    if TRANSFORMERS in best["measured"]:
        predicted[TRANSFORMERS] = predicted["weights_bytes"]
    kept = {name: predicted[name] for name in SCORED[phase] if name in predicted}
    return {"phase": phase, "name": case.name, "case": dataclasses.asdict(case), **best, "predicted": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Folder of this run's results.")
    parser.add_argument("--work", type=Path, required=True, help="Folder for models, recipes and runs; kept, may be large.")
    parser.add_argument("--only", default="", metavar="PATTERN", help="Regular expression in phase/name, as ^serve/ or muon.")
    parser.add_argument("--pairs", action="store_true", help="Measure every configuration a second time, after all others.")
    parser.add_argument("--transformers", action="store_true", help="Also load plain models in transformers, for their bytes.")
    parser.add_argument("--calibrate", action="store_true", help="Calibrate this machine first.")
    given = parser.parse_args()
    out, folder = given.out.resolve(), given.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TWOSTROKE_HOME", str(folder / "home"))
    from twostroke.core.errors import TwostrokeError
    from twostroke.core.openmp import limit_spinning
    from twostroke.kernels.native_library import why_absent

    if absent := why_absent():
        raise SystemExit(f"The engine that is measured has no native library: {absent}")
    limit_spinning(os.environ)
    environment = dict(os.environ)
    if given.calibrate:
        subprocess.run([sys.executable, "-m", "twostroke", "calibrate"], check=True, env=environment)

    raw = out / "raw.jsonl"
    done = _done(raw)
    for number in range(1, 3 if given.pairs else 2):
        for phase, case in chosen(given.only):
            if (case.name, number) in done:
                continue
            try:
                record = {"round": number, **measured(phase, case, folder, environment)}
            except (RuntimeError, subprocess.SubprocessError, OSError, TwostrokeError) as error:
                print(f"{case.name}: {error}", file=sys.stderr, flush=True)
                continue  # another start tries it again
            if given.transformers and isinstance(case, ServingCase) and case.scheme in ("bf16", "fp32") and number == 1:
                size = _transformers_bytes(str(model_directory(case.sizes, folder)), case.scheme)
                record["measured"][TRANSFORMERS] = size
                record["predicted"][TRANSFORMERS] = record["predicted"]["weights_bytes"]
            with raw.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            done[case.name, number] = record
            print(_line(record), file=sys.stderr, flush=True)
    text = summary(list(done.values()))
    recorded.write(out, {"versions.json": _versions(), "summary.md": text})
    print(text)


def _line(record: dict[str, Any]) -> str:
    parts = [f"{record['round']} {record['name']:40} {record['wall_s']:5.1f} s"]
    for name in ("peak_memory_bytes", "step_time_s", "weights_bytes", "kv_cache_bytes", "ttft_s", "tpot_s"):
        if name in record["predicted"] and name in record["measured"]:
            predicted, measured = record["predicted"][name]["value"], record["measured"][name]
            parts.append(f"{name} {100 * (predicted / measured - 1):+.1f}%")
    uncompiled = ["NOT COMPILED"] if record["case"].get("compile") and not record.get("compiled") else []
    return "  ".join([*parts, f"disturbed {100 * record['disturbed_share']:.0f}%", *uncompiled])


def _versions() -> dict[str, Any]:
    import torch

    from twostroke.core.profile import load_profile
    from twostroke.ledger.code_version import code_version

    profile = load_profile("serve")
    machine = profile.fingerprint if profile else None
    return {
        "command": recorded.command(),
        "code": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": dataclasses.asdict(machine) if machine else None,
        "calibrated_at": profile.measured_at if profile else None,
        "calibration_disturbed_share": profile.conditions.disturbed_share if profile else None,
    }


if __name__ == "__main__":
    main()
