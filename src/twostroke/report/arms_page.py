"""Tells what an A/B test found: in lines for a terminal, and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.core.aside import write_text
from twostroke.core.errors import InputError
from twostroke.core.units import format_count, format_seconds
from twostroke.core.version import __version__
from twostroke.evaluation.arms import LEAST_CLIENTS, LEVEL, Arm, Comparison, Estimate, Row
from twostroke.report.cards import Card, Table

COLUMNS = ("", "A", "B", "B − A", "p", "")
POINTS = 400
"""Of a curve: more are not seen."""
WORDS = {
    "client": "The person, conversation, key or address that the server drew by lot. All that it asks is answered by one arm.",
    "95% interval": "In brackets. Of latencies and cost by resampling clients, of shares Wilson's, of their differences "
    "Newcombe's.",
    "told from noise": "p is below 5% after Holm's correction for the number of comparisons, at one look at a test whose size "
    "was decided before.",
    "TTFT, TPOT, E2E": "Seconds from a request's headers to its first token; of each later token; to the end.",
    "cost": "The machine's time, shared equally among the requests in flight at each moment, at the machine's price. Idle time "
    "is not counted.",
    "good rating": "Above 0, of -1 to 1. The last rating of an answer counts.",
}


def verdict(row: Row, comparison: Comparison) -> str:
    """What a row comes to, in words."""
    if row.p_value is None:
        return ""
    if not row.told:
        return "not told from noise"
    if row.better is None:
        return "differs"
    return f"{(comparison.a if row.better == 'a' else comparison.b).name} is better"


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    if unit == "share":
        return f"{100 * value:.1f}%"
    if unit == "usd":
        return f"{'-' if value < 0 else ''}${abs(value):.3g}"
    return format_count(value)


def _shown(found: Estimate | None, unit: str, signed: bool = False) -> str:
    if found is None:
        return "–"

    def one(value: float) -> str:
        return ("+" if signed and value > 0 else "") + _number(value, unit)

    if found.low is None or found.high is None:
        return one(found.value)
    return f"{one(found.value)} [{one(found.low)}, {one(found.high)}]"


def cells(comparison: Comparison) -> list[list[str]]:
    """The table, a row a comparison."""
    rows = []
    for row in comparison.rows:
        p_value = "" if row.p_value is None else f"{row.p_value:.2g}"
        shown = [_shown(row.a, row.unit), _shown(row.b, row.unit), _shown(row.difference, row.unit, signed=True)]
        rows.append([row.name, *shown, p_value, verdict(row, comparison)])
    return rows


def _said(arm: Arm) -> str:
    n_rated = len(arm.rated)
    rated = f", {n_rated} rating{'' if n_rated == 1 else 's'}" if n_rated else ""
    return f"{arm.name}: {len(arm.ids)} requests of {arm.n_clients} client{'' if arm.n_clients == 1 else 's'}{rated}"


def arms_text(comparison: Comparison) -> str:
    """The comparison in lines."""
    table = [[*COLUMNS], *cells(comparison)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    lines = [f"A  {_said(comparison.a)}", f"B  {_said(comparison.b)}", ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, *(f"\n{note}" for note in comparison.notes)])


def write_arms_page(path: Path, comparison: Comparison, price: str) -> Path:
    """Write the page and return its path; ``price`` says what the machine's hour was taken to cost. Raises InputError where it
    cannot be written."""
    import jinja2
    from plotly.offline import get_plotlyjs

    from twostroke.report.page import GLOSSARY, TEMPLATES

    plots = [plot for plot in (_differences(comparison), *_curves(comparison)) if plot is not None]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    html = environment.get_template("arms.html").render(
        a=comparison.a.name,
        b=comparison.b.name,
        said=f"A is {_said(comparison.a)}. B is {_said(comparison.b)}.",
        price=price,
        version=__version__,
        notes=comparison.notes,
        cards=_cards(comparison),
        table=Table("", COLUMNS, cells(comparison)),
        plots=[{"title": plot.title, "text": plot.text, "html": plot.to_html(), "wide": plot.wide} for plot in plots],
        glossary={"prefill, decode": GLOSSARY["prefill, decode"]} | WORDS,
        plotly_js=get_plotlyjs() if plots else "",
    )
    try:
        write_text(path, html)
    except OSError as error:
        raise InputError(f"the page cannot be written to {path}: {error.strerror}. Name another file.") from None
    return path


def _cards(comparison: Comparison) -> list[Card]:
    """The four that are asked for first."""
    cards = []
    for name in ("good ratings", "TTFT median", "E2E median", "cost of a million output tokens"):
        row = next((row for row in comparison.rows if row.name == name), None)
        if row is None or row.difference is None or row.a is None or row.b is None:
            continue
        number = f"{100 * row.difference.value:+.1f} points"
        if row.unit != "share":
            number = f"{100 * (row.b.value / row.a.value - 1):+.1f}%" if row.a.value > 0 else "–"
        said = verdict(row, comparison) or f"no interval: fewer than {LEAST_CLIENTS} clients"
        line = f"B against A: {_number(row.b.value, row.unit)} against {_number(row.a.value, row.unit)}; {said}."
        cards.append(Card(name[0].upper() + name[1:], number, line))
    return cards


def _differences(comparison: Comparison) -> Any:
    """Each difference in percent of A, with its interval."""
    import plotly.graph_objects as go

    from twostroke.report.plot import MEASURED, TERMS, Plot, styled

    rows = [
        (row, row.difference, row.a.value)
        for row in comparison.rows
        if row.difference is not None and row.difference.low is not None and row.a is not None and row.a.value > 0
    ]
    if not rows:
        return None
    figure = go.Figure()
    for told, colour, name in ((True, MEASURED, "told from noise"), (False, TERMS[5], "not told from noise")):
        mine = [each for each in rows if each[0].told is told]
        if not mine:
            continue
        x = [100 * found.value / base for _, found, base in mine]
        up = [100 * (float(found.high or 0.0) - found.value) / base for _, found, base in mine]
        down = [100 * (found.value - float(found.low or 0.0)) / base for _, found, base in mine]
        figure.add_trace(
            go.Scatter(
                x=x, y=[row.name for row, _, _ in mine], mode="markers", name=name,
                marker={"color": colour, "size": 9},
                error_x={"type": "data", "array": up, "arrayminus": down, "color": colour, "thickness": 2},
                hovertemplate="%{y}: %{x:+.1f}%<extra></extra>",
            )
        )  # fmt: skip
    figure.add_vline(x=0, line={"color": "rgba(128, 138, 152, 0.7)", "width": 1})
    order = [row.name for row, _, _ in reversed(rows)]
    figure.update_yaxes(categoryorder="array", categoryarray=order)
    n = sum(row.told for row, _, _ in rows)
    title = f"{n} of {len(rows)} differences are told from noise" if n else "No difference is told from noise"
    text = (
        "A dot a comparison: B's value in percent above (right) or below (left) A's, with its 95% interval. Where an interval "
        f"holds 0 the arms may be alike; p must pass {100 * LEVEL:g}% corrected for all comparisons to be told from noise."
    )
    return Plot(title, text, styled(figure, "B − A, % of A", height=120 + 34 * len(rows)), wide=True)


def _curves(comparison: Comparison) -> list[Any]:
    """How many answers had their first token, and their end, after so long."""
    import plotly.graph_objects as go

    from twostroke.report.plot import MEASURED, PREDICTED, Plot, log_ticks, styled

    plots = []
    for words, name, what in (("first token", "ttft_s", "TTFT"), ("end", "e2e_s", "E2E")):
        figure, ends = go.Figure(), list[float]()
        for arm, colour in ((comparison.a, MEASURED), (comparison.b, PREDICTED)):
            x, y = _curve(getattr(arm, name))
            ends += [value for value in (*x[:1], *x[-1:]) if value > 0]
            figure.add_trace(
                go.Scatter(
                    x=x, y=y, mode="lines", name=arm.name, line={"color": colour, "shape": "hv"},
                    hovertemplate="%{y:.1f}% within %{x:.3g} ms<extra></extra>",
                )
            )  # fmt: skip
        if not ends:
            continue
        figure.update_xaxes(**log_ticks(min(ends), max(ends)))
        row = next((row for row in comparison.rows if row.name == f"{what} median"), None)
        if row is None or row.a is None or row.b is None:
            continue
        within = f"{_number(row.a.value, 's')} in A and {_number(row.b.value, 's')} in B"
        told = f"Half of the answers had their {words} within {within}"
        text = f"The share of answers that had their {words} within so many milliseconds. The curve further left is faster."
        plots.append(Plot(told, text, styled(figure, f"ms to the {words}", "% of answers")))
    return plots


def _curve(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered = np.sort(1e3 * np.array([value for value in values if value == value]))
    at = np.unique(np.linspace(0, len(ordered) - 1, POINTS).round().astype(int)) if len(ordered) else np.array([], dtype=int)
    return ordered[at].tolist(), (100 * (at + 1) / max(1, len(ordered))).tolist()
