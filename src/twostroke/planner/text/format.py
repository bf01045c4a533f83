"""What all plans are written with: quantities in their units, aligned columns, memory, passes and money."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.core.units import format_bytes, format_count, format_money, format_seconds
from twostroke.ledger.text import align, format_interval
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import price
from twostroke.planner.money.cost import excluded_power, price_line, rent_and_power
from twostroke.planner.work.component import Work


def format_quantity(value: float | str | None, unit: str) -> str:
    """A value in one of the table's units; words as they are, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "usd":
        return format_money(value)
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit == "kWh":
        return f"{value:.3g} kWh" if value >= 0.1 else f"{1000 * value:.3g} Wh"
    if unit == "FLOP/B":
        return f"{value:.3g} FLOP/B"
    if unit in ("tok/s", "tokens"):
        return f"{format_count(value)} {unit}"
    if unit == "FLOP":
        return format_count(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def memory_table(terms: Mapping[str, float], peak: float) -> str:
    """Terms above zero and their peak."""
    rows = [[name, format_bytes(value)] for name, value in terms.items() if value]
    return align([*rows, ["peak", format_bytes(peak)]], right=(1,))


def pass_table(passes: Mapping[str, Sequence[Work]]) -> str:
    """Time, bound and intensity of each component of each pass."""
    rows = [["pass", "component", "time", "bound", "intensity"]]
    for title, works in passes.items():
        for i, w in enumerate(works):
            name = title if i == 0 else ""
            rows.append([name, w.component, format_seconds(w.seconds), w.bound, f"{w.intensity:.3g} FLOP/B"])
    return align(rows, right=(2, 4))


def power_line(n_devices: int, watts: float, hardware: Hardware) -> str:
    """What the devices draw on average, and the most that they may."""
    each = f"{watts:,.3g} W of at most {hardware.watts.value:,.4g}"
    return f"power     {each}" if n_devices == 1 else f"power     {n_devices} × {each}"


def money_lines(hardware: Hardware) -> str:
    """The price, the limits of power, what energy leaves out and the grid's CO₂ that were assumed, with their sources."""
    grid = price("grid_kg_co2_per_kwh")
    emitted = price_line("CO2", grid, f"{grid.value:g} kg/kWh, PUE included")
    return "\n".join([*rent_and_power(hardware), excluded_power(hardware), emitted])


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
