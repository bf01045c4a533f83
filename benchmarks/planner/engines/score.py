"""Errors, repeatability and interval coverage of a set of predicted and measured configurations, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.ledger.scoring import quantile

BARS = {
    ("serve", "weights_bytes"): 1.0,
    ("train", "weights_bytes"): 1.0,
    ("serve", "kv_cache_bytes"): 0.5,
    ("train", "peak_memory_bytes"): 3.0,
    ("train", "step_time_s"): 5.0,
    ("serve", "tpot_s"): 7.0,
    ("http", "tpot_s"): 7.0,
    ("serve", "ttft_s"): 10.0,
    ("http", "ttft_s"): 20.0,
    ("http", "startup_s"): 20.0,
    ("http", "output_tok_per_s"): 7.0,
}
"""Median errors in percent that the planner is to stay under. "serve": the engine alone, idle; "http": a server under load."""

COVERAGE = (0.85, 0.95)
"""Share of measurements that the 90% intervals are to hold."""

WIDEST_DECODE = 1.35
"""Factor to either side that a decode interval is to stay within."""


@dataclass(frozen=True)
class Scored:
    """One number of one configuration: error in percent of the measurement, whether it fell inside its interval, and the factor
    to the farther end of that."""

    name: str
    number: int  # of the round
    error: float
    measured: float
    inside: bool | None
    width: float | None


Table = dict[tuple[str, str], list[Scored]]


def scored(records: Sequence[dict[str, Any]]) -> Table:
    """(phase, quantity) → every configuration's."""
    found: Table = {}
    for record in records:
        for quantity, predicted in record["predicted"].items():
            measured, value = record["measured"].get(quantity), predicted["value"]
            if not measured or not value:
                continue
            low, high = predicted.get("low"), predicted.get("high")
            has_ends = low is not None and high is not None and low > 0
            row = Scored(
                record["name"], record.get("round", 1), 100 * (value / measured - 1), measured,
                low <= measured <= high if has_ends else None, max(high / value, value / low) if has_ends else None,
            )  # fmt: skip
            found.setdefault((record["phase"], quantity), []).append(row)
    return found


def repeats(rows: Sequence[Scored]) -> list[float]:
    """By how many percent the second measurement of a configuration differs from its first."""
    by_name: dict[str, dict[int, float]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.number] = row.measured
    return [100 * abs(of[2] / of[1] - 1) for of in by_name.values() if {1, 2} <= of.keys()]


def verdict(rows: Sequence[Scored], bar: float | None) -> str:
    """Met, missed, or missed by no more than two measurements of one configuration differ by."""
    if bar is None:
        return ""
    error, spread = statistics.median(abs(row.error) for row in rows), repeats(rows)
    if error <= bar:
        return f"{bar:g} met"
    if spread and error <= statistics.median(spread):
        return f"{bar:g} missed, within what the machine repeats"
    return f"{bar:g} missed"


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Medians, 90th percentiles and worst cases beside the bars and the repeatability, coverage, and each configuration's main
    errors."""
    table = scored(records)
    counts = {phase: len({r["name"] for r in records if r["phase"] == phase}) for phase in ("train", "serve", "http")}
    lines = [
        f"{counts['train']} training configurations, {counts['serve']} of the engine alone, {counts['http']} over HTTP. "
        "Errors are |predicted − measured| / measured, in percent; bias is the median signed error; repeat is what a second "
        "measurement of the same configuration, made after all others, differs by (median).",
        "",
        "| phase | quantity | n | median | p90 | worst | bias | repeat | inside the 90% interval | bar (median) |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(*key, rows) for key, rows in table.items()),
        "",
        *_coverage(table),
        "",
        "| configuration | errors | disturbed steps |",
        "|---|---|---|",
        *(_configuration(record, table) for record in records),
    ]
    return "\n".join(lines) + "\n"


def _row(phase: str, quantity: str, rows: Sequence[Scored]) -> str:
    sizes, inside = [abs(row.error) for row in rows], [row.inside for row in rows if row.inside is not None]
    worst, again = max(rows, key=lambda row: abs(row.error)), repeats(rows)
    cells = (
        phase, quantity, str(len(rows)), f"{statistics.median(sizes):.2f}", f"{quantile(sizes, 0.9):.2f}",
        f"{abs(worst.error):.2f} ({worst.name})", f"{statistics.median(row.error for row in rows):+.2f}",
        f"{statistics.median(again):.2f}" if again else "–", f"{sum(inside)} of {len(inside)}" if inside else "–",
        verdict(rows, BARS.get((phase, quantity))),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _coverage(table: Table) -> list[str]:
    inside = [row.inside for rows in table.values() for row in rows if row.inside is not None]
    if not inside:
        return []
    share, widths = statistics.mean(inside), [row.width for row in table.get(("serve", "tpot_s"), ()) if row.width is not None]
    met = "met" if COVERAGE[0] <= share <= COVERAGE[1] else "missed"
    aim = f"aim {100 * COVERAGE[0]:g} to {100 * COVERAGE[1]:g}%, {met}"
    lines = [f"Interval coverage over all predictions: {100 * share:.1f}% of {len(inside)} ({aim})."]
    if widths:
        width = statistics.median(widths)
        met = "met" if width <= WIDEST_DECODE else "missed"
        lines.append(f"Decode intervals reach a factor of {width:.2f} (median; aim {WIDEST_DECODE:g}, {met}).")
    return lines


def _configuration(record: dict[str, Any], table: Table) -> str:
    own = [
        f"{quantity} {row.error:+.1f}%"
        for (phase, quantity), rows in table.items()
        for row in rows
        if (row.name, row.number, phase) == (record["name"], record.get("round", 1), record["phase"])
        and (phase, quantity) in BARS
    ]
    again = " (again)" if record.get("round", 1) > 1 else ""
    again += " (compiling failed)" if record["case"].get("compile") and not record.get("compiled") else ""
    return f"| {record['name']}{again} | {', '.join(own)} | {100 * record['disturbed_share']:.0f}% |"
