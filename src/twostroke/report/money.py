"""Plots the cumulative cost of serving against the cost of training, over days of service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from twostroke.core.units import format_count, format_money, format_seconds
from twostroke.ledger.scoring import number_of
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.cost import cost_of, crossover_tokens, usd_per_million_tokens
from twostroke.report.plot import MEASURED, TERMS, Plot, log_ticks, styled

LOADS = ((1.0, "at full load"), (0.1, "at a tenth of it"), (0.01, "at a hundredth"))
"""Loads as shares of the measured tokens per second, all day."""


def crossover(trained: Mapping[str, Any], served: Mapping[str, Any], trained_on: Hardware, served_on: Hardware) -> Plot | None:
    """Cumulative cost of serving at three loads against the cost of the training run, each on its machine at its price.

    Training $ = those that the run recorded, or measured seconds · $/h; serving $ = tokens · $/token at the measured tokens/s
    of full load. So a server that idles is assumed to be shared. A server of one's own costs as much as at full load, whatever
    it serves.
    """
    seconds = number_of(trained.get("train_time_s"))
    rate = number_of(served.get("output_tok_per_s")) or number_of(served.get("decode_tok_per_s"))
    if not seconds or not rate:
        return None
    price = served_on.usd_per_hour
    usd = number_of(trained.get("cost_usd")) or cost_of(seconds, trained_on).usd  # a run of a sweep pays its part
    per_million = usd_per_million_tokens(rate, price.value)
    tokens = crossover_tokens(usd, per_million)
    days_at_full = tokens / rate / 86400
    ends = [days_at_full / 30, days_at_full * 3000]
    unit, per_day = _unit_of_days(days_at_full * 10)
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=[per_day * day for day in ends], y=[usd, usd], mode="lines", name=f"training, once: {format_money(usd)}",
            line={"color": MEASURED, "width": 3},
        )
    )  # fmt: skip
    for (share, label), colour in zip(LOADS, (TERMS[3], TERMS[1], TERMS[2]), strict=True):
        days = days_at_full / share
        daily = rate * share * 86400 * per_million / 1e6
        name = f"serving {label}: {format_count(rate * share)} tokens/s"
        figure.add_trace(
            go.Scatter(
                x=[per_day * day for day in ends], y=[daily * day for day in ends], mode="lines", name=name,
                line={"color": colour, "width": 2.5},
            )
        )  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=[per_day * days], y=[usd], mode="markers+text", showlegend=False, text=[format_seconds(days * 86400)],
                textposition="top left", marker={"color": colour, "size": 11},
                hovertemplate=f"{name}: as much as training after {format_seconds(days * 86400)}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_xaxes(**log_ticks(per_day * ends[0], per_day * ends[1]))
    spent = [rate * per_million / 1e6 * 86400 * day for day in ends]
    figure.update_yaxes(**log_ticks(spent[0] / 100, spent[1]))
    title = (
        f"Serving has cost as much as training after {format_count(tokens)} tokens: {format_seconds(days_at_full * 86400)} at "
        "full load"
    )
    text = (
        f"Money spent since the model went into service, both axes logarithmic. Training is paid once "
        f"({format_seconds(seconds)} measured); served tokens cost {format_money(per_million)} per million (at "
        f"{format_count(rate)} tokens/s measured). At each dot serving has cost as much as training, at three loads. Price "
        f"{price.kind}: ${price.value:.4g} an hour for this machine "
        f"({price.source}). People, data and repeated runs, which often cost more than the final run, are not included."
    )
    return Plot(title, text, styled(figure, f"{unit} of service", "dollars so far", 420), wide=True)


def _unit_of_days(days: float) -> tuple[str, float]:
    """(unit of time in which ``days`` is below 300, number of these units in a day)."""
    for unit, per_day in (("seconds", 86400.0), ("minutes", 1440.0), ("hours", 24.0)):
        if days * per_day < 300:
            return unit, per_day
    return "days", 1.0
