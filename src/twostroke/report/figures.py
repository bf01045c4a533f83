"""Plots of the report, each from plain data. A figure without data is None, and the page leaves it out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from twostroke.ledger.scoring import Row, compare, number_of
from twostroke.ledger.store import Run

PREDICTED, MEASURED = "#8fa8d6", "#1f4e9c"
TERMS = {
    "weights_bytes": ("weights", "#1f4e9c"),
    "gradients_bytes": ("gradients", "#5b8bd9"),
    "optimizer_bytes": ("optimizer state", "#a9c3ee"),
    "activations_bytes": ("activations", "#e0a458"),
    "kv_cache_bytes": ("KV cache", "#c8553d"),
}
SPLIT = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer", "data_s": "data"}
LATENCY = re.compile(r"^(ttft|tpot|itl|e2e)_(median|p50|p90|p95|p99)_s$")


def _styled(figure: go.Figure, title: str, x: str, y: str, height: int = 380) -> go.Figure:
    figure.update_layout(
        title={"text": title, "font": {"size": 16}},
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        height=height,
        margin={"l": 70, "r": 20, "t": 60, "b": 90},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "xanchor": "left"},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure


def training_curve(steps: Sequence[Mapping[str, Any]]) -> go.Figure | None:
    """Loss of each optimizer step in nats per token against the tokens seen so far; ``steps`` are lines of log.jsonl."""
    points = [(s["tokens"], s["loss"]) for s in steps if number_of(s.get("loss")) is not None and s.get("tokens") is not None]
    if not points:
        return None
    figure = go.Figure(go.Scatter(x=[p[0] for p in points], y=[p[1] for p in points], mode="lines", line={"color": MEASURED}))
    return _styled(figure, "Training loss (measured)", "tokens trained on", "loss, nats per token")


def throughput_curve(steps: Sequence[Mapping[str, Any]], predicted_tok_per_s: float | None) -> go.Figure | None:
    """Tokens per second of each step, with the frozen prediction as a line."""
    points = [(s["tokens"], s["tok_per_s"]) for s in steps if number_of(s.get("tok_per_s")) and s.get("tokens") is not None]
    if not points:
        return None
    figure = go.Figure(
        go.Scatter(x=[p[0] for p in points], y=[p[1] for p in points], mode="lines", name="measured", line={"color": MEASURED})
    )
    if predicted_tok_per_s:
        figure.add_hline(y=predicted_tok_per_s, line={"color": PREDICTED, "dash": "dash"}, annotation_text="predicted")
    figure.update_yaxes(rangemode="tozero")
    return _styled(figure, "Training throughput", "tokens trained on", "tokens per second")


def memory_by_term(runs: Sequence[Run]) -> go.Figure | None:
    """Stacked memory terms, predicted beside measured, one pair of bars a run."""
    bars: list[tuple[str, Mapping[str, Any]]] = []
    for run in runs:
        for mark, values in (("predicted", run.prediction), ("measured", run.measurement)):
            if any(number_of(values.get(name)) for name in TERMS):
                bars.append((f"{run.kind} · {mark}", values))
    if not bars:
        return None
    figure = go.Figure()
    for name, (label, colour) in TERMS.items():
        sizes = [(number_of(values.get(name)) or 0.0) / 2**20 for _, values in bars]
        if any(sizes):
            figure.add_bar(x=[bar for bar, _ in bars], y=sizes, name=label, marker_color=colour)
    figure.update_layout(barmode="stack")
    return _styled(figure, "Memory by term", "", "MiB")


def step_split(run: Run | None) -> go.Figure | None:
    """Where the time of one training step goes: forward, backward, optimizer and data, predicted beside measured."""
    if run is None:
        return None
    figure = go.Figure()
    for mark, values, colour in (("predicted", run.prediction, PREDICTED), ("measured", run.measurement, MEASURED)):
        times = {label: number_of(values.get(name)) for name, label in SPLIT.items()}
        known = {label: 1e3 * seconds for label, seconds in times.items() if seconds is not None}
        if known:
            figure.add_bar(x=list(known), y=list(known.values()), name=mark, marker_color=colour)
    return _styled(figure, "One training step", "", "milliseconds") if figure.data else None


def latencies(run: Run | None) -> go.Figure | None:
    """Percentiles of each latency of a load run, on a logarithmic axis since they span decades."""
    if run is None:
        return None
    found: dict[str, dict[str, float]] = {}
    for name, value in run.measurement.items():
        match, number = LATENCY.match(name), number_of(value)
        if match and number:
            found.setdefault(match[2], {})[match[1].upper()] = 1e3 * number
    if not found:
        return None
    figure = go.Figure()
    for percentile, colour in zip(sorted(found), ("#a9c3ee", "#5b8bd9", "#e0a458", "#c8553d", "#7a2e1d"), strict=False):
        figure.add_bar(x=list(found[percentile]), y=list(found[percentile].values()), name=percentile, marker_color=colour)
    figure.update_yaxes(type="log")
    return _styled(figure, "Latency under load (measured)", "", "milliseconds")


def errors(runs: Sequence[Run]) -> go.Figure | None:
    """Error of each predicted number in percent, all runs on one axis; the band is ±10%."""
    rows: list[tuple[str, Row]] = [(run.kind, row) for run in runs for row in compare(run) if row.error_percent is not None]
    if not rows:
        return None
    labels = [f"{kind} · {row.name}" for kind, row in rows]
    values = [row.error_percent or 0.0 for _, row in rows]
    figure = go.Figure(
        go.Bar(
            x=[max(-100.0, min(100.0, v)) for v in values],
            y=labels,
            orientation="h",
            text=[f"{v:+.1f}%" for v in values],
            marker_color=[MEASURED if abs(v) <= 10 else "#c8553d" for v in values],
        )
    )
    figure.add_vrect(x0=-10, x1=10, fillcolor="#1f4e9c", opacity=0.08, line_width=0)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _styled(figure, "Error of the predictions", "100·(predicted − measured) / measured, %", "", 140 + 24 * len(rows))
