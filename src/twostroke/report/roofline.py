"""Plots the roofline of one machine with the components of training, prefill and decode on it.

Source of the model: Williams, Waterman, Patterson 2009, "Roofline": attainable FLOP/s = min(peak, intensity · bandwidth).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go

from twostroke.core.units import format_bytes, format_flop_rate
from twostroke.ledger.scoring import number_of
from twostroke.planner.serving.plan import ServingPlan
from twostroke.planner.training.plan import TrainingPlan
from twostroke.planner.work.component import Work
from twostroke.report.plot import TERMS, Plot, log_ticks, styled

CACHED_BYTES = 2**24
"""A working set that fits into the last-level cache of most processors. Its bandwidth gives the second, steeper roof."""

LOOKS: dict[str, tuple[str, str, str | None]] = {  # phase: colour, symbol, side of its labels
    "training forward": (TERMS[0], "circle", None),  # its marks lie among those of backward
    "training backward": (TERMS[2], "diamond", "top center"),
    "prefill": (TERMS[1], "triangle-up", "middle right"),
    "decode": (TERMS[3], "square", "bottom center"),
}


def phases_of(
    training: TrainingPlan, serving: ServingPlan, trained: Mapping[str, Any], served: Mapping[str, Any]
) -> list[tuple[str, Sequence[Work], float | None]]:
    """(phase, its work by component, measured seconds of the whole phase or None)."""
    n = training.shape.grad_accumulation
    prefill = number_of(served.get("prefill_s"))
    return [
        ("training forward", [w.times(n) for w in training.forward], number_of(trained.get("forward_s"))),
        ("training backward", [w.times(n) for w in training.backward], number_of(trained.get("backward_s"))),
        ("prefill", serving.prefill, prefill),
        ("decode", serving.decode, number_of(served.get("decode_step_s")) or number_of(served.get("tpot_s"))),
    ]


def roofline(
    training: TrainingPlan, serving: ServingPlan, trained: Mapping[str, Any], served: Mapping[str, Any]
) -> Plot | None:
    """Components of all phases by arithmetic intensity and speed, under the machine's roofs. ``trained`` and ``served`` are
    measurements from the ledger."""
    hardware = training.hardware
    weights = training.memory_bytes["weights"]
    whole = [
        (phase, sum(w.flops for w in works) / moved, sum(w.flops for w in works), sum(w.seconds for w in works), measured)
        for phase, works, measured in phases_of(training, serving, trained, served)
        if (moved := sum(w.bytes for w in works)) and any(w.flops for w in works)
    ]
    if not whole:
        return None
    figure = go.Figure()
    slowest: list[float] = [flops / (measured or seconds) for _, _, flops, seconds, measured in whole]
    intensities = [intensity for _, intensity, *_ in whole]
    left, right = min(0.1, *intensities) / 2, max(1000.0, *intensities) * 2
    memory = hardware.bandwidth(max(weights, 2**30))
    peak = hardware.peak(training.shape.dtype)
    for name, bandwidth, dash in (("memory", memory, "solid"), ("cache", hardware.bandwidth(CACHED_BYTES), "dot")):
        if dash == "dot" and bandwidth < 1.1 * memory:
            continue
        ridge = peak / bandwidth
        figure.add_trace(
            go.Scatter(
                x=[left, ridge, right], y=[left * bandwidth, peak, peak], mode="lines", hoverinfo="skip",
                name=f"{name} {format_bytes(bandwidth)}/s, {training.shape.dtype} products {format_flop_rate(peak)}",
                line={"color": "#7c8796", "width": 2, "dash": dash},
            )
        )  # fmt: skip
    for phase, works, _ in phases_of(training, serving, trained, served):
        colour, symbol, position = LOOKS[phase]
        points = [w for w in works if w.flops and w.bytes and w.seconds]
        total = sum(w.seconds for w in works)
        slowest += [w.flops / w.seconds for w in points]
        figure.add_trace(
            go.Scatter(
                x=[w.intensity for w in points],
                y=[w.flops / w.seconds for w in points],
                mode="markers+text",
                texttemplate="%{customdata}",
                customdata=_labels(points) if position else [""] * len(points),
                textposition=position,
                textfont={"size": 11},
                name=f"{phase}, components",
                marker={"color": colour, "symbol": symbol, "opacity": 0.75, "line": {"width": 0},
                        "size": [7 + 17 * (w.seconds / total) ** 0.5 for w in points]},
                hovertext=[f"{phase}, {w.component}: {100 * w.seconds / total:.0f}% of its time, {w.bound}" for w in points],
                hovertemplate="%{hovertext}<br>%{x:.3g} FLOP/byte, %{y:.3s}FLOP/s (predicted)<extra></extra>",
            )
        )  # fmt: skip
    for phase, intensity, flops, seconds, measured in whole:
        colour, symbol, _ = LOOKS[phase]
        if measured:
            figure.add_trace(
                go.Scatter(
                    x=[intensity, intensity], y=[flops / seconds, flops / measured], mode="lines+markers",
                    name=f"{phase}, measured",
                    line={"color": colour, "width": 1.5, "dash": "dot"},
                    marker={"color": colour, "symbol": f"{symbol}-open", "size": [1, 18],
                            "line": {"width": 3}},
                    hovertemplate=phase + ", whole: %{x:.3g} FLOP/byte, %{y:.3s}FLOP/s (large: measured)<extra></extra>",
                )
            )  # fmt: skip
    figure.update_xaxes(**log_ticks(left, right))
    figure.update_yaxes(**log_ticks(min(slowest) / 2, 2 * peak))
    figure = styled(figure, "arithmetic intensity, FLOP per byte moved", "FLOP per second", 520)
    return Plot(_title(whole, peak / memory), _TEXT, figure, wide=True)


def _title(whole: Sequence[tuple[str, float, float, float, float | None]], ridge: float) -> str:
    found = {phase: intensity for phase, intensity, *_ in whole}
    does = [
        f"{label} does {found[phase]:.3g}"
        for phase, label in (("training forward", "Training"), ("decode", "decode"))
        if phase in found
    ]
    return f"{', '.join(does)} FLOP for each byte moved; below {ridge:.3g} memory is this machine's limit, above it arithmetic"


def _labels(points: Sequence[Work]) -> list[str]:
    """Labels for the components that take most of a phase's time. Close marks share one label, so that labels do not
    overlap."""
    total = sum(w.seconds for w in points)
    labels = [""] * len(points)
    large = [i for i, w in enumerate(points) if w.seconds > 0.15 * total]
    for i in sorted(large, key=lambda i: points[i].intensity):
        near = next((j for j in large if labels[j] and _close(points[i], points[j])), i)
        labels[near] = f"{labels[near]}, {points[i].component}" if labels[near] else points[i].component
    return labels


def _close(a: Work, b: Work) -> bool:
    """Whether the labels of two marks would overlap, which is within a third of a decade in both directions."""
    return abs(log10(a.intensity / b.intensity)) < 0.34 and abs(log10(a.flops / a.seconds * b.seconds / b.flops)) < 0.34


_TEXT = (
    "The roofline. To the right: more arithmetic for each byte that is moved. Up: more arithmetic a second. The grey roof "
    "is the most this machine can do: on its slope memory is the limit, on its flat part the product units are; the dotted "
    "roof is for data that fits in the cache. Small marks are components as predicted, sized by their share of the phase's "
    "time; large open marks are whole phases as measured. Training and prefill use a weight for many tokens each time they "
    "read it, so they are on the right. Decode reads every weight for one token of each request, so it is on the left. A mark "
    "far below the roof has another limit, such as starting operations, or shapes too small to fill the units."
)
