"""Errors and interval coverage of a set of predicted and measured configurations, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from twostroke.ledger.scoring import quantile

BARS = {
    ("serve", "weights_bytes"): 1.0,
    ("train", "weights_bytes"): 1.0,
    ("serve", "kv_cache_bytes"): 0.5,
    ("train", "peak_memory_bytes"): 3.0,
    ("train", "step_time_s"): 5.0,
    ("serve", "tpot_s"): 7.0,
    ("serve", "ttft_s"): 10.0,
}
"""Median errors in percent that the planner is to stay under."""


def errors(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[str, float, bool | None]]]:
    """(phase, quantity) → (configuration, 100·(predicted/measured − 1), whether the measurement fell inside the interval)."""
    found: dict[tuple[str, str], list[tuple[str, float, bool | None]]] = {}
    for record in records:
        for name, predicted in record["predicted"].items():
            measured = record["measured"].get(name)
            if not measured:
                continue
            inside = None
            if predicted.get("low") is not None:
                inside = predicted["low"] <= measured <= predicted["high"]
            row = (record["name"], 100 * (predicted["value"] / measured - 1), inside)
            found.setdefault((record["phase"], name), []).append(row)
    return found


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Medians, 90th percentiles and worst cases beside the bars, coverage, and every configuration's main errors."""
    table = errors(records)
    lines = [
        f"{sum(r['phase'] == 'train' for r in records)} training and {sum(r['phase'] == 'serve' for r in records)} serving "
        "configurations. Errors are |predicted − measured| / measured, in percent; bias is the median signed error.",
        "",
        "| phase | quantity | n | median | p90 | worst | bias | inside the 90% interval | bar (median) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    pooled: list[bool] = []
    for (phase, name), rows in table.items():
        sizes = [abs(error) for _, error, _ in rows]
        inside = [is_in for _, _, is_in in rows if is_in is not None]
        pooled += inside
        worst = max(rows, key=lambda row: abs(row[1]))
        bar = BARS.get((phase, name))
        met = "" if bar is None else f"{bar:g} {'met' if statistics.median(sizes) <= bar else 'missed'}"
        lines.append(
            f"| {phase} | {name} | {len(rows)} | {statistics.median(sizes):.2f} | {quantile(sizes, 0.9):.2f} | "
            f"{abs(worst[1]):.2f} ({worst[0]}) | {statistics.median(e for _, e, _ in rows):+.2f} | "
            f"{f'{sum(inside)} of {len(inside)}' if inside else '–'} | {met} |"
        )
    if pooled:
        lines += [
            "",
            f"Interval coverage over all predictions: {100 * statistics.mean(pooled):.1f}% of {len(pooled)} (aim 90%).",
        ]
    lines += ["", "| configuration | errors | disturbed steps |", "|---|---|---|"]
    for record in records:
        parts = [
            f"{name} {error:+.1f}%"
            for (phase, name), rows in table.items()
            for case, error, _ in rows
            if case == record["name"] and phase == record["phase"] and (phase, name) in BARS
        ]
        lines.append(f"| {record['name']} | {', '.join(parts)} | {100 * record['disturbed_share']:.0f}% |")
    return "\n".join(lines) + "\n"
