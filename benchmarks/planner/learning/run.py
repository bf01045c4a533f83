"""Runs small training and serving commands, lets ``twostroke ledger fit`` learn from them, and scores runs that come after.

python benchmarks/planner/learning/run.py --work WORK --out benchmarks/planner/learning/runs/<date>-<machine>-<commit>
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recorded

from twostroke.core.described import plain
from twostroke.core.profile import load_profile, read_fingerprint
from twostroke.ledger.code_version import code_version
from twostroke.ledger.store import Ledger, Run
from twostroke.planner.truth.learning import WAITED, error_percent, residuals_of
from twostroke.planner.truth.restated import QUANTITIES, TOTALS, factors_of, phase_of

STEPS = 24
SEED = 7
PROMPT, OUTPUT = 64, 32


@dataclass(frozen=True)
class Trained:
    """One training command; the models of ``served`` ones are loaded by the commands that serve."""

    n_layers: int
    width: int
    batch_size: int
    sequence_length: int
    optimizer: str = "adamw"
    compiled: bool = False

    @property
    def name(self) -> str:
        how = "compiled" if self.compiled else "eager"
        return f"l{self.n_layers}-e{self.width}-b{self.batch_size}-t{self.sequence_length}-{self.optimizer}-{how}"


@dataclass(frozen=True)
class Served:
    """One `bench offline`: a run of the ledger for each batch size."""

    model: Trained
    scheme: str
    batches: tuple[int, ...]


BASES = (Trained(2, 128, 8, 256), Trained(4, 256, 4, 256, compiled=True), Trained(6, 192, 8, 128, "muon"))
"""Trained first: they are served."""

LEARNT_FROM: tuple[Trained | Served, ...] = (
    Trained(3, 128, 4, 256), Trained(4, 128, 8, 128, "muon"), Trained(2, 256, 8, 128), Trained(4, 192, 4, 256, "muon"),
    Trained(6, 128, 4, 128), Trained(3, 256, 2, 256, "muon"), Trained(5, 192, 2, 512), Trained(2, 192, 8, 256),
    Trained(3, 192, 4, 256, compiled=True), Trained(2, 256, 8, 256, "muon", compiled=True),
    Trained(5, 128, 8, 256, compiled=True), Trained(3, 128, 16, 128, "muon", compiled=True),
    Trained(6, 256, 2, 256, compiled=True), Trained(4, 192, 8, 128, compiled=True),
    *(Served(model, scheme, batches) for model in BASES for scheme, batches in (("bf16", (1, 4)), ("int8", (2, 8)))),
)  # fmt: skip

AFTER: tuple[Trained | Served, ...] = (
    Trained(5, 256, 4, 128), Trained(4, 128, 4, 256, "muon"), Trained(7, 128, 8, 128), Trained(3, 256, 4, 256, compiled=True),
    Trained(6, 192, 4, 128, "muon", compiled=True), *(Served(model, "bf16", (2, 16)) for model in BASES),
    *(Served(model, "int8", (1, 5)) for model in BASES),
)  # fmt: skip


def twostroke(*arguments: str) -> str:
    command = [sys.executable, "-m", "twostroke", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout


def do(case: Trained | Served, work: Path) -> None:
    if isinstance(case, Served):
        batches = [part for n in case.batches for part in ("--batch", str(n))]
        lengths = ["--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT)]
        model = str(work / case.model.name / "model")
        twostroke("bench", "offline", model, "--dtype", case.scheme, *batches, *lengths, "--json")
        return
    recipe = work / f"{case.name}.toml"
    recipe.write_text(
        f'method = "pretrain"\noutput = "{work / case.name}"\n[model]\nn_layers = {case.n_layers}\nd_model = {case.width}\n'
        f"n_heads = {case.width // 64}\nd_ff = {case.width * 8 // 3 // 64 * 64}\n"
        f'[data]\nsources = ["stdlib"]\nvocab_size = 4096\n[train]\nsteps = {STEPS}\nbatch_size = {case.batch_size}\n'
        f'sequence_length = {case.sequence_length}\noptimizer = "{case.optimizer}"\nweight_decay = 0.0\n'
        f"compile = {str(case.compiled).lower()}\n",
        encoding="utf-8",
    )
    twostroke("train", str(recipe), "--json")


def all_of(cases: Sequence[Trained | Served], work: Path) -> None:
    """Each command once: a file beside the work says which are done."""
    done = work / "done.txt"
    before = done.read_text(encoding="utf-8").splitlines() if done.is_file() else []
    for i, case in enumerate(cases):
        if str(case) not in before:
            print(f"{i + 1}/{len(cases)} {case}", file=sys.stderr)
            do(case, work)
            with done.open("a", encoding="utf-8") as file:
                file.write(f"{case}\n")


def _row(run: Run) -> dict[str, Any]:
    kept = {"device", "batch", "steps", "corrections", "dtype"}
    predicted = {name: value.get("value") if isinstance(value, dict) else value for name, value in run.prediction.items()}
    return {
        "run_id": run.run_id, "subject": Path(run.subject).name, "frozen_at": run.frozen_at, "status": run.status,
        "inputs": {name: value for name, value in run.inputs.items() if name in kept},
        "predicted": predicted, "measured": {name: value for name, value in run.measurement.items() if name in predicted},
        WAITED: run.measurement.get(WAITED),
    }  # fmt: skip


def _after_table(runs: Sequence[Run]) -> list[str]:
    """Every quantity and total of the runs that came after: as calibration alone plans them, and as they were planned."""
    lines = ["| quantity | n | error, calibration alone | as planned |", "|---|---|---|---|"]
    names = [(q.name, q.phase, q.ledger_names[0]) for q in QUANTITIES]
    names += [(total, phase, total) for phase, totals in TOTALS.items() for total in totals]
    for label, phase, name in names:
        own = [run for run in runs if phase_of(run) == phase]
        before = [r for _, r in residuals_of(own, name, {})]
        after = [r for run in own for _, r in residuals_of([run], name, factors_of(run))]
        if before:
            lines.append(f"| {label} | {len(before)} | {error_percent(before):.1f}% | {error_percent(after):.1f}% |")
    return lines


def summary(fits: Sequence[dict[str, Any]], text: str, after: Sequence[Run], note: str) -> str:
    learned = [one for fit in fits for one in fit["quantities"] if one["n_runs"]]
    refused = [f"{one['quantity']} ({one['why']})" for one in learned if not one["is_adopted"]]
    worse = [t["name"] for fit in fits for t in fit["totals"] if t["after_percent"] > t["before_percent"]]
    lines = [
        "# What a ledger taught", "", f"{read_fingerprint().cpu_model}, code {code_version()}. {note}".rstrip(), "",
        "## Held out in time", "", "```", text.strip(), "```", "",
        f"Not adopted: {'; '.join(refused) or 'nothing'}.", f"Totals that are worse than before: {', '.join(worse) or 'none'}.",
        "", "## Runs that came after, of shapes that were not among them", "", *_after_table(after), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder of this run's results.")
    parser.add_argument("--work", type=Path, required=True, help="Folder for recipes and runs; kept.")
    parser.add_argument("--summary", action="store_true", help="Write what there is by now, without the runs that are left.")
    parser.add_argument("--note", default="", help="A sentence for the summary: what else the machine did.")
    arguments = parser.parse_args()
    out, work = arguments.out.resolve(), arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if Ledger().runs(limit=1) and not (work / "done.txt").is_file():
        parser.error("the ledger of this home has runs already. Set TWOSTROKE_HOME to one with a profile and no ledger.")
    first = [*LEARNT_FROM]
    random.Random(SEED).shuffle(first)
    all_of([*BASES, *first], work)
    if not (work / "learnt.json").is_file():
        fitted = {
            "fits": json.loads(twostroke("ledger", "fit", "--json"))["fits"],
            "text": twostroke("ledger", "fit"),
            "from": [run.run_id for run in Ledger().runs()],
        }
        (work / "learnt.json").write_text(json.dumps(fitted), encoding="utf-8")
    fitted = json.loads((work / "learnt.json").read_text(encoding="utf-8"))
    printed, text, learnt_from = fitted["fits"], fitted["text"], set(fitted["from"])
    if not arguments.summary:
        all_of(AFTER, work)
    runs = Ledger().runs()[::-1]
    profile = load_profile()
    versions = {
        "python": platform.python_version(),
        "torch": profile.torch_version if profile else None,
        "code": code_version(),
    }
    files = {
        "fit.json": {"command": recorded.command(), "versions": versions, "fits": printed},
        "runs.jsonl": "".join(json.dumps(plain(_row(run))) + "\n" for run in runs),
        "summary.md": summary(printed, text, [run for run in runs if run.run_id not in learnt_from], arguments.note),
    }
    recorded.write(out, files)
    print(out / "summary.md")


if __name__ == "__main__":
    main()
