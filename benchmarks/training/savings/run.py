"""What each way to train with less memory saves and costs, measured, beside what the planner says.

    python benchmarks/training/savings/run.py --out benchmarks/training/savings/runs/<date>-<machine>-<commit>

About three minutes on two cores. Predictions need this machine's profile (``twostroke calibrate``); without it only what needs
none is predicted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import recorded  # noqa: E402
from rows import TABLE, Row, spec  # noqa: E402

from twostroke.core.errors import ConfigError  # noqa: E402
from twostroke.planner.hardware.tables import load_hardware  # noqa: E402
from twostroke.planner.training.plan import plan_training  # noqa: E402

SHOWN = ("peak_memory_bytes", "activations_bytes", "step_time_s")


def predicted(row: Row) -> dict[str, float]:
    """The plan's numbers by the names of what is measured; empty without a profile."""
    try:
        hardware = load_hardware("this", "train")
    except ConfigError:
        return {}
    plan = plan_training(spec(), row.shape(), hardware)
    return {name: value for name, value in plan.prediction().items() if isinstance(value, float | int)} | {
        f"memory.{term}": value for term, value in plan.memory_bytes.items()
    }


def measured(row: Row, steps: int, eager: bool) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "measure.py"), row.name, "--steps", str(steps), *(["--eager"] if eager else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: measured, predicted and their ratio for each row."""
    lines = [
        "| row | peak MB | predicted | ratio | activations MB | predicted | ratio | step s | predicted | ratio |",
        "|---|" + "---:|" * 9,
    ]
    for record in records:
        cells = [record["row"]]
        for name in SHOWN:
            scale, digits = (1e6, 0) if name.endswith("_bytes") else (1.0, 3)
            found, said = record["measured"][name], record["predicted"].get(name)
            cells.append(f"{found / scale:,.{digits}f}")
            cells += ["", ""] if said is None else [f"{said / scale:,.{digits}f}", f"{said / found:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Folder for raw.jsonl and summary.md.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eager", action="store_true", help="Without torch.compile.")
    parser.add_argument("--rows", nargs="*", default=[row.name for row in TABLE])
    given = parser.parse_args()
    records = []
    for row in TABLE:
        if row.name in given.rows:
            records.append({"row": row.name, "predicted": predicted(row), "measured": measured(row, given.steps, given.eager)})
            print(f"{row.name}: {records[-1]['measured']['step_time_s']:.3f} s a step", file=sys.stderr)
    summary = table(records)
    print(summary)
    if given.out:
        import torch

        context = {
            "command": recorded.command(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": recorded.machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        raw = "".join(json.dumps(r) + "\n" for r in [context, *records])
        text = f"`{context['command']}`, torch {context['torch']}, {context['machine']}, {context['at']}\n\n{summary}"
        recorded.write(given.out, {"raw.jsonl": raw, "summary.md": text})


if __name__ == "__main__":
    main()
