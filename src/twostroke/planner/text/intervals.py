"""The headline numbers of a plan with their intervals, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from twostroke.ledger.text import format_interval

HEADLINES = {  # ledger name: what it is called in a plan
    "step_time_s": "step",
    "train_tok_per_s": "rate",
    "train_time_s": "run",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "output_tok_per_s": "rate",
    "peak_memory_bytes": "peak",
}


def intervals_text(intervals: Mapping[str, Mapping[str, Any]], low_by: float = 0.0) -> str:
    """``range     step 65.2 ms [59–92.5], …``: the numbers that a decision rests on, as ``with_intervals`` returns them, and
    whether the width of any is assumed; ``low_by`` as ``intervals.low_by_of`` returns it. Empty where none was predicted."""
    shown = {name: intervals[name] for name in HEADLINES if intervals.get(name, {}).get("value") is not None}
    if not shown:
        return ""
    numbers = [f"{HEADLINES[name]} {format_interval(name, i['value'], i['low'], i['high'])}" for name, i in shown.items()]
    assumed = [HEADLINES[name] for name, i in shown.items() if i["width"] != "measured"]
    widths = "measured" if not assumed else "assumed" if len(assumed) == len(shown) else f"assumed for {', '.join(assumed)}"
    level = next(iter(shown.values()))["level"]
    text = f"{', '.join(numbers)}; {100 * level:.0f}% of measurements should fall inside (widths {widths})"
    if low_by > 0:
        text += (
            f"; this machine was busy when it was calibrated: its rates may read {100 * low_by:.0f}% low, and times may come "
            "out shorter by as much. `twostroke calibrate` on an idle machine narrows this"
        )
    return textwrap.fill(text, 118, initial_indent="range     ", subsequent_indent=" " * 10, break_on_hyphens=False)
