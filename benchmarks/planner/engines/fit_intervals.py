"""Writes ``planner/truth/intervals.toml`` from the residuals of a run: the widths that predictions carry from then on.

The run's TTFT is that of an idle engine, so it tells of prefills; a server's has waiting and HTTP in it and stays as it is.

    python benchmarks/planner/engines/fit_intervals.py RUN/raw.jsonl --source "benchmarks/planner/engines, 2026-11-21"

A coverage that is quoted must be of a later run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from twostroke.planner.truth.intervals import FILE, Pair, fit_intervals


def pairs_of_run(raw: Path) -> list[Pair]:
    """Every scored prediction of the run with its measurement. Quantities that a rate and a time share are taken once."""
    found = []
    for line in raw.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name, predicted in record["predicted"].items():
            measured = record["measured"].get(name)
            if measured and not name.endswith(("_tok_per_s", "_in_transformers")):
                name = "prefill_s" if name == "ttft_s" else name
                found.append(Pair(name, predicted["value"], measured, "measured", record["phase"], run=record["name"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", type=Path)
    parser.add_argument("--source", required=True)
    arguments = parser.parse_args()
    FILE.write_text(fit_intervals(pairs_of_run(arguments.raw), arguments.source), encoding="utf-8")


if __name__ == "__main__":
    main()
