"""What all plans are written with: quantities in their units, aligned columns, memory, passes and money."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from twostroke.core.units import format_bytes, format_count, format_energy, format_money, format_seconds
from twostroke.ledger.text import align, format_interval
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import price
from twostroke.planner.money.cost import excluded_power, price_line, rent_and_power
from twostroke.planner.work.component import Work

WIDTH = 80
"""Longest line of a plan's text, in columns: of a terminal as it opens."""

LAUNCH = "launch: starting the operations takes longer than their work"

LEAST_NOTE = 12
"""Columns that a table's last cell has at least, before it makes the table wider instead."""

LEAST_LOW_BY = 0.005
"""Share below which a busy calibration is not worth a sentence: it would say 0%."""


_HARD_SPACE = "\u00a0"
_UNIT = re.compile(r"(?<=\d) (?=(?:µs|ms|s|min|h|d|[KMGT]iB|B|GB|GB/s|W|k?Wh|mWh|tok/s|tokens)\b)")
"""The space between a number and its unit, at which no line ends."""


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
        return format_energy(value)
    if unit == "FLOP/B":
        return f"{value:.3g} FLOP/B"
    if unit in ("tok/s", "tokens"):
        return f"{format_count(value)} {unit}"
    if unit == "FLOP":
        return format_count(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_range(low: float | None, high: float | None, unit: str) -> str:
    """``880–960 ms``: both ends, their unit once where it is the same."""
    first, last = format_quantity(low, unit), format_quantity(high, unit)
    number, _, of = first.partition(" ")
    return f"{number if of == last.partition(' ')[2] else first}–{last}"


def format_intensity(flop_per_byte: float) -> str:
    """``1,523 FLOP/B``; a dash for what computes nothing."""
    if not flop_per_byte:
        return "–"
    return f"{flop_per_byte:,.0f} FLOP/B" if flop_per_byte >= 100 else f"{flop_per_byte:.2g} FLOP/B"


def fits_lines(peak_bytes: float, n_devices: int, hardware: Hardware, remedy: str, sharing: int = 1) -> list[str]:
    """The first lines of a plan that its device, or the part of each of ``sharing`` ranks, cannot hold, with what would fit;
    nothing for one that fits."""
    if sharing * peak_bytes <= hardware.memory_bytes:
        return []
    return [*wrapped([f"DOES NOT FIT: {needs_text(peak_bytes, n_devices, hardware, sharing)}", remedy]), ""]


def needs_text(peak_bytes: float, n_devices: int, hardware: Hardware, sharing: int = 1) -> str:
    each = f" on each of {n_devices:,} {member(sharing)}s" if n_devices > 1 else ""
    has = f"{hardware.label} has {format_bytes(hardware.memory_bytes)}" + (f" for {sharing} ranks" if sharing > 1 else "")
    return f"it takes {format_bytes(peak_bytes)}{each}, and {has}."


def member(sharing: int) -> str:
    """What one of a layout's parts is called: a device, or one of ``sharing`` ranks on a device."""
    return "rank" if sharing > 1 else "device"


def on_text(n_devices: int, hardware: Hardware) -> str:
    """``8 × NVIDIA H100 SXM 80 GB``; of one device its name alone."""
    return f"{n_devices:,} × {hardware.label}" if n_devices > 1 else hardware.label


def rent_text(n_devices: int, hardware: Hardware) -> str:
    """``8 × $2.95 an hour``."""
    usd = hardware.usd_per_hour.value
    each = f"${usd:.2f} an hour" if usd == round(usd, 2) else f"${usd:.4g} an hour"
    return f"{n_devices:,} × {each}" if n_devices > 1 else each


def memory_table(terms: Mapping[str, float], peak: float) -> str:
    """Terms above zero and their peak."""
    rows = [[name.replace("kv_", "KV ").replace("_", " "), format_bytes(value)] for name, value in terms.items() if value]
    return align([*rows, ["peak", format_bytes(peak)]], right=(1,))


def pass_table(passes: Mapping[str, Sequence[Work]]) -> str:
    """Time, bound and intensity of each component of each pass."""
    rows = [["pass", "component", "time", "bound", "intensity"]]
    for title, works in passes.items():
        for i, w in enumerate(works):
            name = title if i == 0 else ""
            rows.append([name, w.component, format_seconds(w.seconds), w.bound, format_intensity(w.intensity)])
    starting = any(work.bound == "launch" for works in passes.values() for work in works)
    return "\n".join([align(rows, right=(2, 4)), *([LAUNCH] if starting else [])])


def money_lines(hardware: Hardware) -> str:
    """The price, the limits of power, what energy leaves out and the grid's CO₂ that were assumed, with their sources."""
    grid = price("grid_kg_co2_per_kwh")
    emitted = price_line("CO2", grid, f"{grid.value:g} kg/kWh, PUE included")
    return "\n".join([*rent_and_power(hardware), excluded_power(hardware), emitted])


def wrapped(lines: Iterable[str], indent: str = "  ", width: int = WIDTH) -> list[str]:
    """Sentences at ``width``, continued with an indent; a path that is longer stays whole."""
    wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return [part.replace(_HARD_SPACE, " ") for line in lines for part in wrap.wrap(_UNIT.sub(_HARD_SPACE, line))]


def footnotes(lines: Iterable[str]) -> str:
    """Prices, powers and their sources: what a reader looks up once, below everything else."""
    return "\n".join(["sources", *wrapped((f"  {' '.join(line.split())}" for line in lines), "    ")])


def notes_lines(notes: Iterable[str]) -> list[str]:
    return wrapped(f"note: {note}" for note in notes)


class Result(NamedTuple):
    """A line of a plan's results. ``name`` is the ledger's, under which the interval stands; ``value`` in words where it has no
    such name; ``note`` says whose number it is."""

    label: str
    name: str | None = None
    value: str = ""
    note: str = ""


Intervals = Mapping[str, Mapping[str, Any]]
"""Ledger name → what ``truth.intervals.with_intervals`` returns for it."""

NO_INTERVALS: Intervals = {}


def power_result(n_devices: int, watts: float, hardware: Hardware) -> Result:
    """What the devices draw on average, and the most that they may."""
    each = f"{watts:,.3g} W"
    most = f"at most {hardware.watts.value:,.4g} W{' each' if n_devices > 1 else ''}"
    return Result("power", None, f"{n_devices:,} × {each}" if n_devices > 1 else each, most)


def results_table(results: Sequence[Result], intervals: Intervals, low_by: float = 0.0) -> str:
    """Each result with its interval and its note, then what the intervals mean and whether their widths were measured."""
    rows = [["", "predicted", "90% range" if _ranged(results, intervals) else "", ""]]
    for result in results:
        value, ends = _value_and_ends(result, intervals)
        rows.append([result.label, value, ends, result.note])
    if not any(row[2] for row in rows):
        rows = [[label, value, note] for label, value, _, note in rows]
    return "\n".join([with_wrapped_notes(rows), *wrapped(_range_sentences(results, intervals, low_by), "")])


def _ranged(results: Sequence[Result], intervals: Intervals) -> dict[str, Mapping[str, Any]]:
    """Label → interval of those results that have one."""
    return {r.label: i for r in results if r.name and (i := intervals.get(r.name, {})).get("value") is not None}


def _value_and_ends(result: Result, intervals: Intervals) -> tuple[str, str]:
    found = intervals.get(result.name or "", {})
    if found.get("value") is None:
        return result.value, ""
    text = format_interval(result.name or "", found["value"], found["low"], found["high"])
    value, _, ends = text.partition(" [")
    return value, f"[{ends}" if ends else ""


def with_wrapped_notes(rows: Sequence[Sequence[str]], right: Sequence[int] = (), gap: str = "  ", width: int = WIDTH) -> str:
    """Aligned rows, of which the last cell goes on below itself beyond ``width``."""
    taken = sum(max(len(row[i]) for row in rows) + len(gap) for i in range(len(rows[0]) - 1))
    spread: list[Sequence[str]] = []
    for row in rows:
        notes = wrapped([row[-1]], "", max(LEAST_NOTE, width - taken)) or [""]
        spread += [[*row[:-1], notes[0]], *([*[""] * (len(row) - 1), more] for more in notes[1:])]
    return align(spread, right, gap)


def _range_sentences(results: Sequence[Result], intervals: Intervals, low_by: float) -> list[str]:
    """What the ranges promise, and what made them wide."""
    shown = _ranged(results, intervals)
    if not shown:
        return []
    assumed = [label for label, i in shown.items() if i["width"] != "measured"]
    measured = [label for label in shown if label not in assumed]
    widths = "measured" if not assumed else f"assumed for {', '.join(assumed)}"
    if len(measured) < len(assumed):
        widths = f"assumed, but measured for {', '.join(measured)}" if measured else "assumed"
    level = next(iter(shown.values()))["level"]
    found = [f"range: {100 * level:.0f}% of measurements should fall inside it; widths {widths}."]
    if low_by >= LEAST_LOW_BY:
        found.append(
            f"This machine was busy when it was calibrated: its rates may read {100 * low_by:.0f}% low, and times may come out "
            "shorter by as much. `twostroke calibrate` on an idle machine narrows this."
        )
    return found
