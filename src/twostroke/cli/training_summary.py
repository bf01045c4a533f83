"""Sums up a finished training run in a few lines: its result, and what was predicted beside what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twostroke.core.units import format_count
from twostroke.ledger.scoring import error_percent, number_of
from twostroke.ledger.text import align, format_error, format_value

COMPARED = (
    ("time", "train_time_s"),
    ("a step", "step_time_s"),
    ("  forward", "forward_s"),
    ("  backward", "backward_s"),
    ("  optimizer", "optimizer_s"),
    ("  data", "data_s"),
    ("speed", "train_tok_per_s"),
    ("MFU", "mfu"),
    ("peak memory", "peak_memory_bytes"),
    ("start-up", "startup_s"),
)
"""Rows of the table, in this order, as far as they were measured."""


def summary_text(directory: Path, summary: dict[str, Any]) -> str:
    """The summary of a run, at most 80 columns wide except for paths."""
    measured = summary["measurement"]
    lines = [
        f"trained   {summary['steps']:,} steps, {format_count(summary['tokens'])} tokens, "
        f"loss {summary['final_loss'] or 0:.4f}",
        f"held out  {_quality(measured)}",
    ]
    if summary["skipped_steps"]:
        lines.append(f"skipped   {summary['skipped_steps']} steps; log.jsonl says which and why")
    lines += [f"model     {directory / 'model'}", "", _table(measured, summary.get("prediction") or {})]
    return "\n".join(lines)


def _table(measured: dict[str, Any], prediction: dict[str, Any]) -> str:
    rows = [["", "predicted", "measured", "error"]]
    for title, name in COMPARED:
        found, expected = number_of(measured.get(name)), number_of(prediction.get(name))
        if found is not None:
            cells = [format_value(name, expected), format_value(name, found), format_error(error_percent(expected, found))]
            rows.append([title, *cells])
    if not prediction:
        return align([[row[0], row[2]] for row in rows], right=(1,)) + "\nNothing was predicted: `twostroke calibrate` first."
    return align(rows, right=(1, 2, 3))


def _quality(measured: dict[str, Any]) -> str:
    if "heldout_answer_nats_per_token" in measured:
        return f"{measured['heldout_answer_nats_per_token']:.4f} nats a token of the assistant's answers measured"
    quality, xz = measured["heldout_bits_per_byte"], measured.get("xz_bits_per_byte")
    against = f" (xz -9 of that text: {xz:.4f}, {'below' if quality < xz else 'not below'})" if xz else ""
    return f"{quality:.4f} bits per byte measured{against}"
