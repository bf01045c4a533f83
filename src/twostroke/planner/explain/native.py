"""Formulas of a pass of the native engine: each matrix at its measured rate, what surrounds them at fitted prices."""

from __future__ import annotations

from twostroke.planner.explain.term import Explanation
from twostroke.planner.hardware import Hardware
from twostroke.planner.native_passes import Use, logit_bytes
from twostroke.planner.native_products import native_matrices, packed_bytes

_RATE = "the library's product as calibrated"
_PRICES = "fitted to whole steps of the engine, products taken off"


def explain_native_pass(
    terms: Explanation,
    name: str,
    total: str,
    uses: list[Use],
    units: dict[str, float],
    prices: dict[str, float],
    working_set: float,
    kv_bytes: float,
    ratio: float,
    value: float,
    hardware: Hardware,
) -> None:
    """A term for each use of a matrix, attention, what is left, and ``total`` = ``value``, the plan's own number.

    ``units`` and ``prices`` by ``planner.native_anchors.UNITS``; ``ratio``: measured ÷ planned of calibration's prompts."""
    here, there = hardware.bandwidth(working_set), hardware.bandwidth(hardware.native_rates.working_set_bytes)
    parts: list[str] = []
    for use in uses:
        n, k = native_matrices(use.product)[0]
        rate, n_bytes = hardware.product_rate(use.name, use.rows, n, k), packed_bytes(use.name, n, k)
        seconds = 2.0 * use.rows * n * k / rate
        share = min(1.0, n_bytes / seconds / there)
        count = len(native_matrices(use.product)) * use.times
        mixed = len({other.name for other in uses if other.product.name == use.product.name}) > 1
        held = f"_{use.name.removeprefix('native_')}" if mixed else ""
        symbol = f"{name}_{use.product.name}{held}_{use.rows}_s"
        parts.append(symbol)
        terms.add(
            "time", symbol, count * max(seconds * (1 + share**2 * (there / here - 1)), n_bytes / here), "s",
            "matrices·max(2·rows·n·k/rate·(1 + share^2·(β_0/β − 1)), bytes/β)",
            f"{use.name.removeprefix('native_')}: {_RATE} over W₀; reading's share; β at the working set",
            "measured", matrices=count, rows=use.rows, n=n, k=k, rate=rate, share=share, β_0=there, β=here, bytes=n_bytes,
        )  # fmt: skip
    sampled = sum(use.rows for use in uses if use.product.name == "head")
    logits = logit_bytes(sampled, uses[-1].product.n)
    terms.add(
        "time", f"{name}_logits_s", logits / hardware.bandwidth(logits), "s", "8·rows·V/β", "fp32 logits, written and read",
        "measured", rows=sampled, V=uses[-1].product.n, β=hardware.bandwidth(logits),
    )  # fmt: skip
    unit = "key" if "key" in units else "attention"
    attention_s = max(units[unit] * prices.get(unit, 0.0), kv_bytes / here)
    terms.add(
        "time", f"{name}_attention_s", attention_s, "s", "max(units·price, bytes/β)",
        f"{'numbers of keys and values walked' if unit == 'key' else 'FLOP of visible pairs'}, {_PRICES}; or reading the cache",
        "measured", units=units[unit], price=prices.get(unit, 0.0), bytes=kv_bytes, β=here,
    )  # fmt: skip
    numbers: dict[str, float] = {}
    sums = []
    for other in units:
        if other != unit:
            numbers |= {f"n_{other}": units[other], f"{other}_s": prices.get(other, 0.0)}
            sums.append(f"n_{other}·{other}_s")
    around = sum(units[other] * prices.get(other, 0.0) for other in units if other != unit)
    terms.add(
        "time", f"{name}_around_s", around, "s", " + ".join(sums),
        f"scheduling and sampling, rows handed on, barriers of a layer, numbers that norms and activations pass; {_PRICES}",
        "measured", **numbers,
    )  # fmt: skip
    whole = " + ".join([*parts, f"{name}_logits_s", f"{name}_attention_s", f"{name}_around_s"])
    if ratio == 1.0:
        terms.add("time", total, value, "s", whole, "one after another", "measured")
        return
    terms.add(
        "time", total, value, "s", f"ratio·({whole})",
        "ratio: measured ÷ planned of calibration's prompts, at this width and so many tokens", "measured", ratio=ratio,
    )  # fmt: skip
