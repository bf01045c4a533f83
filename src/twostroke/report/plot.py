"""The common form of the report's plots: a title with the finding, a sentence on how to read it, and one style."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go

from twostroke.core.units import format_count

MEASURED, PREDICTED = "#2f7fe0", "#d9730d"
"""The colours of measured and predicted values in every plot. Both are readable on white and on black."""

TERMS = ("#2f7fe0", "#0a9396", "#8b5cf6", "#d9730d", "#d6455d", "#7c8796", "#5a9e3d")
"""Colours of terms, passes and latencies, in that order."""

GRID = "rgba(128, 138, 152, 0.28)"


@dataclass(frozen=True)
class Plot:
    """One figure of the page. ``title`` states the finding, and ``text`` says how to read the figure."""

    title: str
    text: str
    figure: go.Figure
    wide: bool = False

    def to_html(self) -> str:
        """The figure as HTML, which needs Plotly's script on the page and nothing from the network."""
        config = {"displayModeBar": False, "responsive": True}
        return str(self.figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def styled(figure: go.Figure, x: str = "", y: str = "", height: int = 380, **layout: Any) -> go.Figure:
    """Apply the page's style. Text and lines are a medium grey, and the page's style sheet gives text its own colour."""
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 24, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 13, "color": "#6b7685"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "xanchor": "left", "title": None},
    )
    figure.update_layout(**layout)
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor=GRID, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor=GRID, automargin=True)
    if x:
        figure.update_xaxes(title_text=x)
    if y:
        figure.update_yaxes(title_text=y)
    return figure


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis from ``low`` to ``high`` with full numbers at 1, 2 and 5 of each decade, or at fewer places for a wide
    range. Plotly's own ticks write 10^3, or a "2" that may stand for 2 or 20."""
    first, last = floor(log10(low)), ceil(log10(high))
    decades = range(first, last + 1)
    if last - first <= 2:
        values = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    else:
        every = 1 if last - first <= 5 else 2 if last - first <= 10 else 3
        values = [10.0**decade for decade in decades if decade % every == 0]
    return {
        "type": "log",
        "range": [log10(low) - 0.04, log10(high) + 0.04],
        "tickvals": values,
        "ticktext": [_plain(value) for value in values],
    }


def _plain(value: float) -> str:
    return format_count(value) if value >= 1e4 else f"{value:,.10g}" if value >= 1e-4 else f"{value:.0e}"
