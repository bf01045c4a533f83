"""Plots runs from the ledger. A plot without data is None, and the page leaves it out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twostroke.core.units import format_bytes, format_count, format_seconds
from twostroke.ledger.attribution import Attribution, attribute
from twostroke.ledger.scoring import Row, compare, error_percent, interval_of, number_of, quantile
from twostroke.ledger.store import Run
from twostroke.ledger.text import format_error, format_interval, format_value
from twostroke.report.plot import MEASURED, PREDICTED, TERMS, Plot, log_ticks, styled

MEMORY_TERMS = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations",
    "kv_cache_bytes": "KV cache",
}
PASSES = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer", "data_s": "data"}
TOTALS = {
    "step_time_s": "training step",
    "peak_memory_bytes": "peak memory",
    "train_time_s": "whole run",
    "ttft_s": "first token",
    "tpot_s": "later token",
    "e2e_s": "whole answer",
}
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "end to end"}
PERCENTILE = re.compile(r"^(ttft|tpot|itl|e2e)_(median|p90|p95|p99)_s$")

PANELS = (  # ending of the ledger's name, title, factor to the axis' unit
    (re.compile(r"(?<!per)_s$"), "seconds", 1.0),
    (re.compile(r"(?<!per_s)_bytes$"), "MiB", 2.0**-20),
    (re.compile(r"tok_per_s$"), "tokens/s", 1.0),
)

SHOWN_RUNS = 200
"""Newest runs of which every number is drawn. Marks of more runs would cover each other, and each mark adds text to the
page."""


# -- predicted against measured -------------------------------------------------------------------------------------------


def predicted_against_measured(runs: Sequence[Run]) -> Plot | None:
    """Each prediction of the newest ``SHOWN_RUNS`` runs against its measurement, on log-log axes with a panel for each unit."""
    points: list[list[tuple[Run, Row]]] = [[] for _ in PANELS]
    for run in runs[:SHOWN_RUNS]:
        for row in compare(run):
            panel = next((i for i, (ending, _, _) in enumerate(PANELS) if ending.search(row.name)), None)
            if panel is not None and (row.predicted or 0) > 0 and (row.measured or 0) > 0:
                points[panel].append((run, row))
    shown = [(place, found) for place, found in enumerate(points) if found]
    if not shown:
        return None
    figure = make_subplots(1, len(shown), horizontal_spacing=0.07)
    in_legend: set[str] = set()
    for column, (place, found) in enumerate(shown, start=1):
        factor = PANELS[place][2]
        values = [factor * v for _, row in found for v in (row.predicted, row.measured, row.low, row.high) if v]
        ends = [min(values) / 1.5, max(values) * 1.5]
        figure.add_trace(
            go.Scatter(
                x=ends, y=ends, mode="lines", line={"color": "#7c8796", "dash": "dot", "width": 1.5}, hoverinfo="skip",
                name="predicted = measured", showlegend="line" not in in_legend, legendgroup="line",
            ),
            1, column,
        )  # fmt: skip
        in_legend.add("line")
        for phase, colour in (("training", TERMS[2]), ("serving", TERMS[1])):
            for state, symbol in (("inside its interval", "circle"), ("outside", "x"), ("no interval", "circle-open")):
                part = [
                    (run, row) for run, row in found if (run.kind == "train") == (phase == "training") and _state(row) == state
                ]
                if part:
                    name = f"{phase}, {state}"
                    figure.add_trace(_points(part, factor, name, colour, symbol, name not in in_legend), 1, column)
                    in_legend.add(name)
        axis = log_ticks(ends[0], ends[1])
        figure.update_xaxes(**axis, title_text=f"measured {PANELS[place][1]}", row=1, col=column)
        figure.update_yaxes(**axis, title_text="predicted" if column == 1 else "", row=1, col=column)
    # The title counts the same numbers as the page's cards, also those of units without a panel.
    rows = [row for run in runs for row in compare(run) if row.error_percent is not None]
    errors = [abs(row.error_percent) for row in rows if row.error_percent is not None]
    inside = [row.inside for row in rows if row.inside is not None]
    title = f"Half of {len(rows)} predictions were within {quantile(errors, 0.5):.0f}% of what was measured"
    if inside:
        title += f"; {100 * sum(inside) / len(inside):.0f}% of measurements fell inside their interval"
    text = (
        "Each mark is one number of one run, predicted before it and measured in it. On the dotted line the two are equal; "
        "above it the prediction was too high. The bar is the interval frozen with the prediction, meant to hold 90% of "
        "measurements; if it crosses the dotted line, it does. Point at a mark to see which number it is."
    )
    return Plot(title, text, styled(figure, height=430), wide=True)


def _state(row: Row) -> str:
    return {True: "inside its interval", False: "outside", None: "no interval"}[row.inside]


def _points(part: Sequence[tuple[Run, Row]], factor: float, name: str, colour: str, symbol: str, in_legend: bool) -> go.Scatter:
    """Marks, with their intervals as vertical bars."""
    rows = [row for _, row in part]
    bars = {
        "array": [factor * max(0.0, (row.high or 0) - (row.predicted or 0)) for row in rows],
        "arrayminus": [factor * max(0.0, (row.predicted or 0) - (row.low or row.predicted or 0)) for row in rows],
    }
    return go.Scatter(
        x=[factor * (row.measured or 0) for row in rows],
        y=[factor * (row.predicted or 0) for row in rows],
        error_y={"type": "data", "symmetric": False, "thickness": 1, "width": 0, "color": colour, **bars},
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 8},
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        text=[
            f"{row.name} of {run.run_id}<br>predicted {format_interval(row.name, row.predicted, row.low, row.high)}"
            f"<br>measured {format_value(row.name, row.measured)} ({format_error(row.error_percent)})"
            for run, row in part
        ],
        hovertemplate="%{text}<extra></extra>",
    )


# -- which term missed ----------------------------------------------------------------------------------------------------


def residual_by_term(runs: Sequence[Run]) -> Plot | None:
    """Each total's error divided among its terms, of the newest run that has it. The bars of a total add up to its error."""
    newest: dict[str, Attribution] = {}
    for run in runs:
        for one in attribute(run):
            newest.setdefault(one.total, one)
    if not newest:
        return None
    ordered = [newest[total] for total in TOTALS if total in newest]
    groups, labels, values, texts = [], [], [], []
    for one in ordered:
        for share in sorted(one.shares, key=lambda s: -abs(s.percent)):
            groups.append(f"<b>{TOTALS[one.total]}</b> {one.error_percent:+.0f}%")
            labels.append(share.part.partition(";")[0].removesuffix("_s").removesuffix("_bytes").replace("_", " "))
            values.append(share.percent)
            unit = one.total
            texts.append(f"predicted {format_value(unit, share.predicted)}, measured {format_value(unit, share.measured)}")
    figure = go.Figure(
        go.Bar(
            x=values,
            y=[groups, labels],
            orientation="h",
            marker_color=[PREDICTED if value > 0 else MEASURED for value in values],
            text=["0%" if abs(value) < 0.05 else f"{value:+.1f}%" for value in values],
            textposition="outside",
            cliponaxis=False,
            customdata=texts,
            hovertemplate="%{y}: %{x:+.1f}% of the measured total<br>%{customdata}<extra></extra>",
        )
    )
    most = max(map(abs, values))
    figure.update_xaxes(range=[min(0.0, *values) - 0.5 * most, max(0.0, *values) + 0.5 * most], zeroline=True)
    figure.update_yaxes(autorange="reversed")
    worst = max(ordered, key=lambda one: abs(one.error_percent))
    part = worst.worst.part.partition(";")[0].removesuffix("_s").removesuffix("_bytes").replace("_", " ")
    title = (
        f"The largest miss, {TOTALS[worst.total]} at {worst.error_percent:+.0f}%, comes mostly from: {part} "
        f"({worst.worst.percent:+.0f} points)"
    )
    text = (
        "Which term caused the error. Each total's error (predicted minus measured, in percent of the measured total) is "
        "divided "
        "among its terms; the bars of one total add up to its error. Bars to the right (orange) were predicted too high, to "
        "the left (blue) too low. Bars in opposite directions cancel in the total. Newest run of each kind."
    )
    return Plot(title, text, styled(figure, "percent of the measured total", "", 90 + 27 * len(values)), wide=True)


# -- training -------------------------------------------------------------------------------------------------------------


def training_curve(steps: Sequence[Mapping[str, Any]], prediction: Mapping[str, Any]) -> Plot | None:
    """Loss in nats per token and tokens per second of each step against the tokens seen. ``steps`` are lines of log.jsonl."""
    seen = [s for s in steps if s.get("tokens") is not None]
    losses = [(s["tokens"], s["loss"]) for s in seen if number_of(s.get("loss")) is not None]
    rates = [(s["tokens"], s["tok_per_s"]) for s in seen if number_of(s.get("tok_per_s"))]
    if not losses:
        return None
    rows = 2 if rates else 1
    figure = make_subplots(rows, 1, shared_xaxes=True, vertical_spacing=0.09)
    figure.add_trace(_line(losses, "loss", TERMS[0]), 1, 1)
    figure.update_yaxes(title_text="nats per token", row=1, col=1)
    first, last = losses[0][1], quantile([loss for _, loss in losses[-max(1, len(losses) // 10) :]], 0.5)
    fell = "fell" if last < first else "went"
    title = f"Loss {fell} from {first:.2f} to {last:.2f} nats per token over {format_count(losses[-1][0])} tokens"
    if rates:
        median = quantile([rate for _, rate in rates], 0.5)
        figure.add_trace(_line(rates, "tokens per second", TERMS[1]), 2, 1)
        predicted = number_of(prediction.get("train_tok_per_s"))
        if predicted:
            low, high = interval_of(prediction.get("train_tok_per_s"))
            ends = [rates[0][0], rates[-1][0]]
            if low and high:
                band = go.Scatter(
                    x=[*ends, *ends[::-1]], y=[low, low, high, high], fill="toself", mode="none", hoverinfo="skip",
                    fillcolor="rgba(217, 115, 13, 0.16)", name="interval",
                )  # fmt: skip
                figure.add_trace(band, 2, 1)
            dashed = go.Scatter(
                x=ends, y=[predicted, predicted], mode="lines", name="predicted", line={"color": PREDICTED, "dash": "dash"}
            )
            figure.add_trace(dashed, 2, 1)
            title += f"; {format_count(median)} tokens/s where {format_count(predicted)} were predicted"
        figure.update_yaxes(title_text="tokens/s", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="tokens trained on", row=rows, col=1)
    text = (
        "Above is the loss of each optimizer step. e to the power of the loss is the perplexity, the number "
        "of equally probable tokens among which the choice would be as uncertain. Below is the speed of each step. The first "
        "steps compile, and at dips another "
        "program used the machine."
    )
    if number_of(prediction.get("train_tok_per_s")):
        text += " The dashed line was predicted."
    return Plot(title, text, styled(figure, height=430 if rates else 300))


def _line(points: Sequence[tuple[float, float]], name: str, colour: str) -> go.Scatter:
    return go.Scatter(x=[p[0] for p in points], y=[p[1] for p in points], mode="lines", name=name, line={"color": colour})


def step_split(run: Run | None) -> Plot | None:
    """The time of one training step by forward, backward, optimizer and data, predicted beside measured."""
    if run is None:
        return None
    figure = go.Figure()
    measured: dict[str, float] = {}
    for mark, values, colour in (("predicted", run.prediction, PREDICTED), ("measured", run.measurement, MEASURED)):
        times = {label: number_of(values.get(name)) for name, label in PASSES.items()}
        known = {label: 1e3 * seconds for label, seconds in times.items() if seconds is not None}
        if not known:
            continue
        measured = known
        ends = {label: interval_of(values.get(name)) for name, label in PASSES.items() if label in known}
        bars = {
            "array": [1e3 * high - known[label] if high else 0.0 for label, (_, high) in ends.items()],
            "arrayminus": [known[label] - 1e3 * low if low else 0.0 for label, (low, _) in ends.items()],
        }
        figure.add_bar(
            x=list(known),
            y=list(known.values()),
            name=mark,
            marker_color=colour,
            text=[format_seconds(value / 1e3) for value in known.values()],
            textposition="auto",
            insidetextanchor="start",
            insidetextfont={"color": "#ffffff", "size": 11},
            textangle=0,
            error_y={"type": "data", "symmetric": False, "color": "#7c8796", "thickness": 1.5, "width": 0, **bars},
        )
    if not figure.data:
        return None
    largest = max(measured, key=lambda label: measured[label])
    title = f"The {largest} pass takes {100 * measured[largest] / sum(measured.values()):.0f}% of a training step"
    step, predicted = number_of(run.measurement.get("step_time_s")), number_of(run.prediction.get("step_time_s"))
    if step and predicted:
        title += f" of {format_seconds(step)}, predicted {format_seconds(predicted)}"
    text = "Medians over all steps but the first of a session."
    if predicted:
        text += " The grey line is the interval of the prediction."
    # If bars are too narrow for their numbers, as on a phone, all are left out. The axis and the hover text show them.
    hidden = {"uniformtext_minsize": 9, "uniformtext_mode": "hide"}
    return Plot(title, text, styled(figure, "", "milliseconds a step", 430, **hidden))


# -- memory ---------------------------------------------------------------------------------------------------------------


def memory_by_term(runs: Sequence[Run]) -> Plot | None:
    """Stacked memory terms of each run, predicted beside measured. The rest of the peak is a term of its own."""
    bars: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        for mark, values in (("predicted", run.prediction), ("measured", run.measurement)):
            terms = {label: number_of(values.get(name)) or 0.0 for name, label in MEMORY_TERMS.items()}
            if any(terms.values()):
                # If the peak was not measured, the predicted one is not drawn either, so that the two bars are comparable.
                known = number_of(run.measurement.get("peak_memory_bytes")) or not run.measurement
                rest = (number_of(values.get("peak_memory_bytes")) or 0.0) - sum(terms.values())
                terms["process, loss, buffers"] = max(0.0, rest) if known else 0.0
                bars.append((f"{run.kind} {mark}", {label: size / 2**20 for label, size in terms.items()}))
    if not bars:
        return None
    figure = go.Figure()
    for label, colour in zip((*MEMORY_TERMS.values(), "process, loss, buffers"), (*TERMS[:5], TERMS[5]), strict=True):
        sizes = [terms[label] for _, terms in bars]
        if any(sizes):
            figure.add_bar(
                y=[bar for bar, _ in bars], x=sizes, name=label, orientation="h", marker_color=colour,
                hovertemplate="%{y}: " + label + " %{x:.3g} MiB<extra></extra>",
            )  # fmt: skip
    for place, (_, terms) in enumerate(bars):
        total = sum(terms.values())
        figure.add_annotation(
            x=total, y=place, text=f" {format_bytes(total * 2**20)}", showarrow=False, xanchor="left", font={"size": 12}
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(range=[0, 1.3 * max(sum(terms.values()) for _, terms in bars)])
    text = (
        "A training run holds weights, gradients, optimizer state and activations; a server holds weights and the KV cache of "
        "its requests. Grey is the process, the loss and memory that the allocator keeps: if a peak was measured, the peak "
        "minus "
        "the other terms. A KV cache is reserved when a server starts, whether or not it is used."
    )
    return Plot(
        _memory_title(runs), text, styled(figure, "MiB", "", 170 + 46 * len(bars), barmode="stack", legend_traceorder="normal")
    )


def _memory_title(runs: Sequence[Run]) -> str:
    for run in runs:
        predicted = number_of(run.prediction.get("peak_memory_bytes"))
        measured = number_of(run.measurement.get("peak_memory_bytes"))
        if measured:
            title = f"{'Training' if run.kind == 'train' else 'Serving'} took {format_bytes(measured)} at its peak"
            if predicted:
                error = error_percent(predicted, measured) or 0.0
                title += f", {format_bytes(predicted)} were predicted ({error:+.0f}%)"
            return title
    return "Memory by term, predicted beside measured"


# -- latency --------------------------------------------------------------------------------------------------------------


def latencies(run: Run | None) -> Plot | None:
    """The distribution of each latency of a load run, and the prediction of its median."""
    return None if run is None else latency_curves(run.measurement, run.prediction)


def latency_curves(measurement: Mapping[str, Any], prediction: Mapping[str, Any]) -> Plot | None:
    """The same of what was measured and predicted by the ledger's names."""
    curves = _curves(measurement)
    if not curves:
        return None
    figure = go.Figure()
    first_predicted = next((name for name in LATENCIES if name in curves and number_of(prediction.get(name))), "")
    for (name, label), colour in zip(LATENCIES.items(), TERMS, strict=False):
        if name not in curves:
            continue
        percents, seconds = curves[name]
        milliseconds = [1e3 * s for s in seconds]
        mode = "lines" if len(percents) > 8 else "lines+markers"
        figure.add_trace(
            go.Scatter(
                x=milliseconds, y=percents, mode=mode, name=label, line={"color": colour, "width": 2.5},
                hovertemplate=f"{label}: %{{y:.3g}}% within %{{x:.3g}} ms<extra></extra>",
            )
        )  # fmt: skip
        predicted = number_of(prediction.get(name))
        if predicted:
            figure.add_trace(
                go.Scatter(
                    x=[1e3 * predicted], y=[50], mode="markers", name="predicted median", legendgroup="predicted",
                    showlegend=name == first_predicted,
                    marker={"symbol": "diamond-open", "size": 11, "color": colour, "line": {"width": 2.5}},
                )
            )  # fmt: skip
    spread = [1e3 * s for _, seconds in curves.values() for s in seconds if s > 0]
    figure.update_xaxes(**log_ticks(min(spread), max(spread)))
    figure.update_yaxes(range=[0, 102], ticksuffix="%")
    first = curves.get("ttft_s") or next(iter(curves.values()))
    label = "first tokens" if "ttft_s" in curves else "answers"
    half, most = _at(first, 50), _at(first, 99)
    title = f"Half of the {label} came within {format_seconds(half)}, 99% within {format_seconds(most)}"
    text = (
        "The share of requests that were at least so fast. TTFT: time to the first token. TPOT: mean time of each later token. "
        "ITL: each gap between two tokens. End to end: the whole answer. A steep line means that all requests were about as "
        "fast; "
        "a long flat top means that a few waited."
    )
    if first_predicted:
        text += " Diamonds are the predicted medians."
    return Plot(title, text, styled(figure, "milliseconds", "share of requests"))


def _curves(measurement: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """(percent, seconds) of each latency: the distribution if the ledger has it, else its percentiles."""
    kept = measurement.get("latency_quantiles")
    if isinstance(kept, Mapping) and isinstance(kept.get("percent"), list):
        return {name: (kept["percent"], kept[name]) for name in LATENCIES if isinstance(kept.get(name), list)}
    found: dict[str, dict[float, float]] = {}
    for name, value in measurement.items():
        match, number = PERCENTILE.match(name), number_of(value)
        if match and number:
            percent = 50.0 if match[2] == "median" else float(match[2][1:])
            found.setdefault(f"{match[1]}_s", {})[percent] = number
    return {name: (sorted(points), [points[p] for p in sorted(points)]) for name, points in found.items()}


def _at(curve: tuple[list[float], list[float]], percent: float) -> float:
    """The value at the kept percent that is nearest to ``percent``."""
    percents, seconds = curve
    return seconds[min(range(len(percents)), key=lambda i: abs(percents[i] - percent))]
