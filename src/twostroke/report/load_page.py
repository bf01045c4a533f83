"""Writes the page of a load: one run, a sweep of rates, or the same for several settings of the engine.

It is made of the document that ``twostroke bench serve --json`` prints, so that a page can be written of a kept document, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from twostroke.core.aside import write_text
from twostroke.core.errors import InputError
from twostroke.core.units import format_count, format_seconds
from twostroke.core.version import __version__
from twostroke.ledger.scoring import error_percent, number_of
from twostroke.ledger.text import format_error, format_value
from twostroke.report.cards import Card, Table
from twostroke.report.figures import latency_curves
from twostroke.report.page import GLOSSARY, TEMPLATES
from twostroke.report.plot import MEASURED, PREDICTED, TERMS, Plot, log_ticks, styled

LATENCIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2e_s": "end to end",
    "ttft_from_sent_s": "TTFT from sent",
    "e2e_from_sent_s": "end to end from sent",
    "send_delay_s": "send delay",
    "start_delay_s": "start delay",
}
PERCENTILES = ("median", "p90", "p95", "p99")
WORDS = {
    "scheduled, sent": "When a request was due, and when it was sent. Latencies count from the first, so that a server that "
    "holds its client up cannot hide it.",
    "start delay": "How late the load generator itself was. A run whose start delay passes 1% of TTFT is refused.",
    "knee": "The rate at which throughput ÷ response time is greatest: beyond it waiting grows faster than throughput.",
}


@dataclass
class Section:
    """A part of the page."""

    title: str = ""
    notes: list[str] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def write_load_page(path: Path, document: Mapping[str, Any]) -> Path:
    """Write the page and return its path. Raises InputError where it cannot be written."""
    import jinja2
    from plotly.offline import get_plotlyjs

    documents = document.get("variants", [document])
    sections = [section for each in documents for section in _sections(each)]
    if len(documents) > 1:
        sections.insert(0, _variants(documents))
    first: Mapping[str, Any] = next((run for each in documents for run in each.get("runs", [each]) if "url" in run), {})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    html = environment.get_template("load.html").render(
        name=first.get("model") or first.get("url", "a server"),
        said=_said(first.get("load", {})),
        version=__version__,
        sections=[vars(section) | {"plots": [_drawn(plot) for plot in section.plots]} for section in sections],
        glossary=GLOSSARY | WORDS,
        plotly_js=get_plotlyjs() if any(section.plots for section in sections) else "",
    )
    try:
        write_text(path, html)
    except OSError as error:
        raise InputError(f"the page cannot be written to {path}: {error.strerror}. Name another file.") from None
    return path


def _drawn(plot: Plot) -> dict[str, Any]:
    return {"title": plot.title, "text": plot.text, "html": plot.to_html(), "wide": plot.wide}


def _said(load: Mapping[str, Any]) -> str:
    """The load in a sentence."""
    if not load:
        return ""
    if load.get("users"):
        arrivals = f"{load['users']} users who ask again when answered"
    elif load.get("trace"):
        arrivals = f"the trace {Path(load['trace']).name}, {load['speed']:g} times as fast as recorded"
    elif load.get("clients"):
        arrivals = f"the clients of {Path(load['clients']).name}"
    else:
        arrivals = f"{load['arrivals']} arrivals"
    lengths = "" if load.get("trace") or load.get("clients") else (
        f", prompts of {_length(load['prompt_tokens'])} and answers of {_length(load['output_tokens'])} tokens"
    )  # fmt: skip
    turns = f", {load['turns']} turns a conversation" if load.get("turns", 1) > 1 else ""
    return f"{load['n_requests']} requests: {arrivals}{lengths}{turns}."


def _length(value: Any) -> str:
    if isinstance(value, list | tuple):
        return str(value[0]) if value[0] == value[1] else f"{value[0]} to {value[1]}"
    return str(value)


def _sections(document: Mapping[str, Any]) -> list[Section]:
    title = str(document.get("variant", ""))
    if "error" in document:
        return [Section(title, [f"Not measured: {document['error']}"])]
    if "sweep" in document:
        return [_sweep(title, document["sweep"], document["runs"])]
    return [_run(title, document)]


def _run(title: str, document: Mapping[str, Any]) -> Section:
    s, prediction, measured = document["summary"], document["prediction"], document["measurement"]
    section = Section(title)
    if document.get("refusal"):
        section.notes.append(f"Refused: {document['refusal']}")
    section.cards += [
        Card("throughput", f"{s['output_tok_per_s']:,.0f} tok/s", f"output tokens; {s['requests_per_s']:.3g} requests/s"),
        Card("first token", _s(s["ttft_s"]["median"]), f"median; 99% within {_s(s['ttft_s']['p99'])}"),
        Card("between tokens", _s(s["itl_s"]["median"]), f"median; 99% within {_s(s['itl_s']['p99'])}"),
        Card("completed", f"{s['n_completed']} of {s['n_requests']}", _failures(s["failures"])),
    ]
    if s.get("goodput_per_s") is not None:
        section.cards.append(Card("goodput", f"{format_count(s['goodput_per_s'])}/s", f"{s['slo_met']} requests met the SLO"))
    curves = latency_curves(measured | {"latency_quantiles": document["latency_quantiles"]}, prediction)
    section.plots += [plot for plot in (curves, _over_time(document["first_tokens"])) if plot is not None]
    rows = [
        [name, *(_s(s[key][p]) for p in PERCENTILES), document["definitions"][key]]
        for key, name in LATENCIES.items()
        if key in s
    ]
    section.tables.append(Table("Latencies", ["", *PERCENTILES, "what it is"], rows))
    if prediction:
        section.tables.append(
            Table("Predicted beside measured", ["", "predicted", "measured", "error"], _compared(prediction, measured))
        )
    return section


def _failures(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{n} × {why}" for why, n in failures.items()) or "none failed"


def _s(value: Any) -> str:
    return "–" if value is None or value != value else format_seconds(value)


def _compared(prediction: Mapping[str, Any], measured: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, predicted in prediction.items():
        value = measured.get(name)
        cells = format_value(name, predicted), format_value(name, value), format_error(error_percent(predicted, value))
        rows.append([name, *cells])
    return rows


def _over_time(first_tokens: Mapping[str, Sequence[float | None]]) -> Plot | None:
    """When each request was due and how long its first token took, counted from then and from when it was sent."""
    rows = list(zip(*(first_tokens[name] for name in ("scheduled_s", "ttft_s", "ttft_from_sent_s")), strict=True))
    done = [(at, 1e3 * due, 1e3 * sent) for at, due, sent in rows if at is not None and due is not None and sent is not None]
    if not done:
        return None
    at, due, sent = (list(column) for column in zip(*done, strict=True))
    figure = go.Figure()
    for name, values, colour, symbol in (
        ("from when it was due", due, MEASURED, "circle"), ("from when it was sent", sent, TERMS[1], "circle-open"),
    ):  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=at, y=values, mode="markers", name=name, marker={"color": colour, "symbol": symbol, "size": 6},
                hovertemplate="%{y:.3g} ms, due at %{x:.2f} s<extra></extra>",
            )
        )  # fmt: skip
    failed = [row[0] for row in rows if row[1] is None]
    positive = [value for value in (*due, *sent) if value > 0]
    if failed and positive:
        figure.add_trace(
            go.Scatter(
                x=failed, y=[min(positive)] * len(failed), mode="markers", name="failed",
                marker={"color": TERMS[4], "symbol": "x", "size": 8},
            )
        )  # fmt: skip
    if positive:
        figure.update_yaxes(**log_ticks(min(positive), max(positive)))
    late = max(due) > 2 * min(due)
    title = (
        "The time to the first token varied over the run" if late else "The time to the first token stayed alike over the run"
    )
    text = "A dot a request, at the time when it was due. Dots that rise to the right show a queue that grows."
    return Plot(title, text, styled(figure, "seconds since the load began", "ms to first token"), wide=True)


def _sweep(title: str, sweep: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Section:
    points, knee = sweep["points"], sweep["knee_per_s"]
    section = Section(title)
    section.notes += [f"Refused at {p['rate_per_s']:.3g} requests/s: {p['refusal']}" for p in points if p["refusal"]]
    section.cards.append(
        Card("knee", "–" if knee is None else f"{format_count(knee)}/s", "requests a second at which power is greatest")
    )
    within = sweep["within_slo_per_s"]
    if any(p["slo_share"] is not None for p in points):
        section.cards.append(
            Card("within the SLO", "–" if within is None else f"{format_count(within)}/s", "requests a second, at most")
        )
    best = max((p["output_tok_per_s"] for p in points), default=0.0)
    section.cards.append(Card("most throughput", f"{best:,.0f} tok/s", "output tokens"))
    section.plots += [plot for plot in (_throughput_plot(points, runs), _latency_plot(points, runs, knee)) if plot]
    rows = [
        [f"{p['rate_per_s']:.3g}", f"{p['requests_per_s']:.3g}", f"{p['output_tok_per_s']:.1f}"]
        + [_s(p[name]) for name in ("ttft_median_s", "ttft_p99_s", "itl_median_s", "itl_p99_s", "e2e_mean_s")]
        + [format_count(p["power"])]
        for p in points
    ]
    heads = ["sent/s", "completed/s", "output tok/s", "TTFT median", "p99", "ITL median", "p99", "end to end, mean", "power"]
    section.tables.append(Table("By rate", heads, rows, "Power is completed requests a second ÷ mean end to end."))
    return section


def _predicted(runs: Sequence[Mapping[str, Any]], name: str, n: int) -> list[float | None]:
    found = [number_of(run["prediction"].get(name)) for run in runs[:n]]
    return found if any(value is not None for value in found) else []


def _lines(rates: Sequence[float], series: Sequence[tuple[str, Sequence[float | None], str, str]]) -> go.Figure:
    figure = go.Figure()
    for name, values, colour, dash in series:
        if any(value is not None for value in values):
            line = {"color": colour, "width": 2.5, "dash": dash}
            figure.add_trace(go.Scatter(x=list(rates), y=list(values), mode="lines+markers", name=name, line=line))
    return figure


def _throughput_plot(points: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> Plot | None:
    rates = [p["rate_per_s"] for p in points]
    predicted = _predicted(runs, "output_tok_per_s", len(points))
    series = [
        ("measured", [p["output_tok_per_s"] for p in points], MEASURED, "solid"),
        ("predicted", predicted, PREDICTED, "dot"),
    ]
    text = "Throughput follows the rate until the server is full, and then stays."
    best = max((p["output_tok_per_s"] for p in points), default=0.0)
    return Plot(
        f"At most {best:,.0f} output tokens a second", text, styled(_lines(rates, series), "requests/s", "output tok/s")
    )


def _latency_plot(points: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], knee: float | None) -> Plot | None:
    rates, n = [p["rate_per_s"] for p in points], len(points)

    def ms(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else 1e3 * value for value in values]

    series = [
        ("TTFT median", ms([p["ttft_median_s"] for p in points]), MEASURED, "solid"),
        ("TTFT p99", ms([p["ttft_p99_s"] for p in points]), TERMS[2], "solid"),
        ("ITL median", ms([p["itl_median_s"] for p in points]), TERMS[1], "solid"),
        ("ITL p99", ms([p["itl_p99_s"] for p in points]), TERMS[6], "solid"),
        ("TTFT median, predicted", ms(_predicted(runs, "ttft_median_s", n)), PREDICTED, "dot"),
    ]
    figure = _lines(rates, series)
    values = [value for _, row, _, _ in series for value in row if value is not None and value > 0]
    if not values:
        return None
    figure.update_yaxes(**log_ticks(min(values), max(values)))
    if knee is not None:
        figure.add_vline(x=knee, line={"color": "#7c8796", "dash": "dash"})
    title = "No rate counts" if knee is None else f"Beyond {knee:.3g} requests a second waiting grows faster than throughput"
    return Plot(title, "Latencies by rate. The dashed line is the knee.", styled(figure, "requests/s", "milliseconds"))


def _variants(documents: Sequence[Mapping[str, Any]]) -> Section:
    """All settings side by side."""
    heads = ["", "output tok/s", "TTFT median", "p99", "ITL median", "p99", "knee, requests/s"]
    rows = []
    for document in documents:
        name = str(document["variant"])
        if "error" in document:
            rows.append([name, *("–" for _ in heads[1:])])
        elif "sweep" in document:
            points, knee = document["sweep"]["points"], document["sweep"]["knee_per_s"]
            best = max((p["output_tok_per_s"] for p in points), default=0.0)
            rows.append([name, f"{best:,.0f}", "–", "–", "–", "–", "–" if knee is None else f"{knee:.3g}"])
        else:
            s = document["summary"]
            latencies = [_s(s[key][p]) for key in ("ttft_s", "itl_s") for p in ("median", "p99")]
            rows.append([name, f"{s['output_tok_per_s']:,.0f}", *latencies, "–"])
    return Section("Side by side", tables=[Table("The same load on each", heads, rows)])
