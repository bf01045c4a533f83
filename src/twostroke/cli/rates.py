"""Tells in words how near a run came to the machine's limits, for `generate` and `bench offline`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.units import format_count, format_flop_rate, format_seconds

if TYPE_CHECKING:
    from twostroke.engine.achieved import Achieved, PhaseRates


def phase_text(name: str, phase: PhaseRates, product: str) -> str:
    """One line of a phase: "decode   63 tokens, 178 tok/s, 5.61 ms a step: 29.8 GB/s read, 74% of what this machine reads at
    167 MB; 48 GFLOP/s, 2% of its int8 products". Empty if there was no such step."""
    if not phase.steps or phase.seconds <= 0:
        return ""
    read = f"{phase.bytes_per_s / 1e9:.3g} GB/s read"
    if phase.read_share is not None:
        read += f", {100 * phase.read_share:.0f}% of what this machine reads at {phase.bytes_per_step / 1e6:.3g} MB"
    arithmetic = format_flop_rate(phase.flop_per_s)
    if phase.flop_share is not None:
        arithmetic += f", {100 * phase.flop_share:.0f}% of its {product.removeprefix('native_')} products"
    rate = f"{phase.tokens} tokens, {format_count(phase.tok_per_s)} tok/s, {format_seconds(phase.seconds / phase.steps)} a step"
    return f"{name:9}{rate}: {read}; {arithmetic}"


def without_limits(rates: Achieved) -> list[str]:
    """A line that says how to get shares, if a rate has no limit to compare with."""
    phases = [phase for phase in (rates.prefill, rates.decode) if phase.steps]
    if all(phase.read_share is not None and phase.flop_share is not None for phase in phases):
        return []
    remedy = "`twostroke calibrate` measures this machine's limits, and these become shares of them"
    return [f"{'':9}{remedy} ({rates.product})"]
