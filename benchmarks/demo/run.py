"""Keep what a run of ``make demo`` predicted and measured.

    make demo
    python benchmarks/demo/run.py --of runs/demo/300s --out benchmarks/demo/runs/<date>-<machine>-<commit>

``demo.json`` holds the table that README.md shows (``python docs/generate.py`` puts the newest run's there), and the whole
comparison; ``comparison.txt`` is what the demo printed at its end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "src")]

import recorded  # noqa: E402

SHOWN = (  # section, label and column of the comparison
    ("passes", "forward", "train"),
    ("passes", "backward", "train"),
    ("passes", "optimizer", "train"),
    ("rate", "throughput", "train"),
    ("rate", "latency", "train"),
    ("memory", "peak", "train"),
    ("rate", "latency", "prefill"),
    ("rate", "throughput", "decode"),
    ("rate", "latency", "decode"),
)
PHASES = {"train": "training", "prefill": "prefill", "decode": "decode"}


def rows_of(comparison: dict[str, Any]) -> list[dict[str, str]]:
    """What was both predicted and measured, of ``SHOWN``, in words."""
    from twostroke.planner.text.format import format_quantity

    found = []
    by_name = {(row["section"], row["label"]): row for row in comparison["rows"]}
    for section, label, phase in SHOWN:
        cell = (by_name.get((section, label)) or {}).get(phase)
        if cell and cell.get("measured") is not None:
            note = f" ({cell['note']})" if cell.get("note") else ""
            values = {
                mark: format_quantity(cell[key], cell["unit"])
                for mark, key in (("predicted", "value"), ("measured", "measured"))
            }
            found.append({"name": f"{PHASES[phase]}, {label}{note}", **values})
    return found


def main() -> None:
    from twostroke.core.profile import read_fingerprint
    from twostroke.core.units import format_seconds
    from twostroke.ledger.code_version import code_version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=Path, default=Path("runs/demo/300s"), help="the demo's folder")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    comparison = json.loads((given.of / "comparison.json").read_text(encoding="utf-8"))
    here = read_fingerprint()
    record = {
        "command": recorded.command(),
        "machine": f"{here.n_cores} cores of {here.cpu_model}, {datetime.now(UTC):%Y-%m-%d}",
        "code": code_version(),
        "elapsed": format_seconds(comparison["worked_s"]),
        "rows": rows_of(comparison),
        "comparison": comparison,
    }
    recorded.write(given.out, {"demo.json": record})
    shutil.copyfile(given.of / "comparison.txt", given.out / "comparison.txt")


if __name__ == "__main__":
    main()
