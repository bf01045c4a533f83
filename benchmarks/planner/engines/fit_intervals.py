"""Writes ``planner/truth/intervals.toml`` from the residuals of runs: the widths that predictions carry from then on.

    python benchmarks/planner/engines/fit_intervals.py RUN/raw.jsonl ... --source "benchmarks/planner/engines, 2026-11-21"

A coverage that is quoted must be of a later run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from twostroke.core.errors import ConfigError
from twostroke.planner.truth.intervals import (
    FILE,
    LEAST_RUNS,
    LEVEL,
    NARROWEST,
    Pair,
    Range,
    rank,
    read_ranges,
    residuals_by_kind,
)

UNFITTED = ("train_tok_per_s", "prefill_tok_per_s", "decode_tok_per_s", "weights_bytes_in_transformers")
"""Names that say again what others of the same run do."""

LEAST_FOR_QUANTILES = 19
"""Fewest residuals whose two tails of 5% each are order statistics: ⌊(n + 1)·0.05⌋ ≥ 1."""


def fitted_range(residuals: Sequence[float], source: str) -> Range:
    """The range of n ≥ ``LEAST_RUNS`` residuals.

    From ``LEAST_FOR_QUANTILES`` on, the ⌊(n + 1)·α/2⌋-th smallest and the ⌈(n + 1)·(1 − α/2)⌉-th, α = 1 − LEVEL: the order
    statistics that hold the next exchangeable residual with at least ``LEVEL``. Below, the median plus and minus the
    ⌈(n + 1)·LEVEL⌉-th smallest distance from it, which is approximate, since the median is of the same residuals.
    """
    ordered, n = sorted(residuals), len(residuals)
    if n < LEAST_RUNS:
        raise ConfigError(f"{n} residuals are too few for a range of level {LEVEL}: at least {LEAST_RUNS}.")
    if n >= LEAST_FOR_QUANTILES:
        tail = (1 - LEVEL) / 2
        low = ordered[math.floor((n + 1) * tail + 1e-9) - 1]
        high = ordered[rank(n, 1 - tail) - 1]
    else:
        middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
        half = sorted(abs(r - middle) for r in ordered)[rank(n, LEVEL) - 1]
        low, high = middle - half, middle + half
    return Range(min(low, high - 2 * NARROWEST), max(high, low + 2 * NARROWEST), "measured", n, source)


def fit_intervals(rows: Iterable[Pair], source: str = "benchmarks/planner/engines") -> str:
    """The text of an ``intervals.toml`` in which every kind of prediction that ``rows`` hold often enough has a measured range;
    the others keep the one they have. ``source`` says where the rows were measured."""
    ranges = dict(read_ranges())
    for key, found in residuals_by_kind(rows).items():
        if key[0] != "other":
            one = fitted_range(found, source)  # and a prediction is inside its own interval
            ranges[key] = replace(one, low=min(one.low, -NARROWEST), high=max(one.high, NARROWEST))
    return intervals_text(ranges)


def intervals_text(ranges: Mapping[tuple[str, str, str], Range]) -> str:
    """``intervals.toml`` of these ranges."""
    return _HEADER + "".join(_entry(key, one) for key, one in sorted(ranges.items()))


_HEADER = f"""\
# Ranges of ln(measured / predicted) that hold {100 * LEVEL:.0f}% of measurements: predicted · e^low to predicted · e^high.
# Rates share the range of their time. kind = "measured": order statistics of n residuals; "assumed": chosen, for the reason
# in source, until enough were measured. Written by benchmarks/planner/engines/fit_intervals.py and, of datasheet devices that
# serve, benchmarks/planner/public_tables/fit.py.
level = {LEVEL}
"""


def _entry(key: tuple[str, str, str], one: Range) -> str:
    quantity, basis, phase = key
    source = one.source.replace("\\", "\\\\").replace('"', '\\"')
    return (
        f'\n[[interval]]\nquantity = "{quantity}"\nbasis = "{basis}"\nphase = "{phase}"\nlow = {one.low:.4f}\n'
        f'high = {one.high:.4f}\nkind = "{one.kind}"\nn = {one.n}\nsource = "{source}"\n'
    )


def pairs_of_run(raw: Path) -> list[Pair]:
    """Every scored prediction on a measured basis with its measurement. Quantities that a rate and a time share are taken once.
    Two measurements of one configuration are not independent: they count as one run. An idle engine's TTFT is a prefill; a
    server's has waiting in it, and TTFT and throughput over HTTP keep their names."""
    found = []
    for line in raw.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name, predicted in record["predicted"].items():
            measured = record["measured"].get(name)
            if not measured or predicted.get("basis", "measured") != "measured" or name in UNFITTED:
                continue
            over_http = record["phase"] == "http"
            name = "prefill_s" if name == "ttft_s" and not over_http else name
            phase = "train" if record["phase"] == "train" else "serve"
            found.append(Pair(name, predicted["value"], measured, "measured", phase, run=f"{raw}: {record['name']}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--source", required=True)
    arguments = parser.parse_args()
    pairs = itertools.chain.from_iterable(map(pairs_of_run, arguments.raw))
    FILE.write_text(fit_intervals(pairs, arguments.source), encoding="utf-8")


if __name__ == "__main__":
    main()
