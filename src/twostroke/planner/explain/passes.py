"""Formulas of one serving pass on an accelerator: products, cache, prompts, collectives, launches, by the rate of each."""

from __future__ import annotations

from twostroke.planner.explain.term import Explanation, Mark
from twostroke.planner.hardware import Hardware
from twostroke.planner.network import all_to_all_s, ring_all_reduce_s, send_s
from twostroke.planner.step_time import EDGE, Efficiencies, Part, Pass, scaled_link

_NEAREST = {"datasheet": "datasheet's rate × a share fitted to public measured tables (efficiencies.toml)"}


def explain_pass(terms: Explanation, name: str, total: str, once: Pass, rates: Efficiencies, hardware: Hardware) -> None:
    """Terms of the parts of ``once``, named for the pass, and their sum ``total``."""
    source = _NEAREST.get(hardware.basis, "rate measured on this machine")
    bandwidth = hardware.read_bandwidth[-1 if hardware.basis == "measured" else 0].bytes_per_s
    plain = hardware.peak_flop_per_s.get("bf16", hardware.peak_flop_per_s.get("fp32", 0.0))
    parts = []
    for part in once.products:
        symbol = f"{name}_{part.component}_products_s"
        own = plain if part.component == "head" else hardware.peak_flop_per_s[once.dtype]
        _product(terms, symbol, part, once, rates, bandwidth, own, source)
        parts.append(symbol)
    for symbol, part, value in (
        (f"{name}_cache_s", once.cache, once.cache_s(rates)),
        (f"{name}_prompt_attention_s", once.prompts, once.prompts_s(rates)),
    ):
        if not value:
            continue
        formula = "FLOP/(π·share_π)"
        if part.n_bytes:
            formula = f"max(bytes/(β·share_β), {formula})"
        terms.add(
            "time", symbol, value, "s", formula, f"attention over keys that are cached or new; {source}", _mark(hardware),
            bytes=part.n_bytes, β=bandwidth, share_β=rates.cache_bandwidth_share, FLOP=part.flops, π=plain,
            share_π=rates.attention_share,
        )  # fmt: skip
        parts.append(symbol)
    parts += _network(terms, name, once, rates)
    terms.add(
        "time", f"{name}_launches_s", once.starts_s(rates), "s", "operators·operator_s", f"starting kernels; {source}",
        _mark(hardware), operators=sum(once.operators), operator_s=rates.operator_s,
    )  # fmt: skip
    terms.add(
        "time", f"{name}_scheduling_s", once.around_s(rates), "s", "steps·step_s + requests·request_s",
        f"scheduling and sampling; {source}", _mark(hardware), steps=once.steps, step_s=rates.step_s, requests=once.requests,
        request_s=rates.request_s,
    )  # fmt: skip
    parts += [f"{name}_launches_s", f"{name}_scheduling_s"]
    terms.add("time", total, once.seconds(rates), "s", " + ".join(parts), "of the slowest device, one after another")


def _mark(hardware: Hardware) -> Mark:
    return "measured" if hardware.basis == "measured" else "datasheet"


def _product(
    terms: Explanation, symbol: str, part: Part, once: Pass, rates: Efficiencies, bandwidth: float, peak: float, source: str
) -> None:
    """One component's products: a roofline with a rounded corner, (memory^p + arithmetic^p)^(1/p)."""
    memory, arithmetic = "bytes/(β·share_β)", "FLOP/(π·share_π)"
    both = bool(part.n_bytes and part.flops)
    formula = f"(({memory})^p + ({arithmetic})^p)^(1/p)" if both else f"{memory} + {arithmetic}"
    terms.add(
        "time", symbol, once.product_s(part, rates), "s", formula, f"bytes read once and FLOP of all layers; {source}",
        bytes=part.n_bytes, β=bandwidth, share_β=rates.product_bandwidth_share, FLOP=part.flops, π=peak,
        share_π=rates.arithmetic(once.dtype), p=EDGE,
    )  # fmt: skip


def _network(terms: Explanation, name: str, once: Pass, rates: Efficiencies) -> list[str]:
    """Collectives and sends of a pass, where it has any."""
    near, far = scaled_link(once.link, rates), scaled_link(once.far_link, rates)
    reduce_s = ring_all_reduce_s(once.reduced_bytes, once.tensor, near)
    exchange_s = all_to_all_s(once.exchanged_bytes, once.exchange_devices, near)
    parts = []
    for kind, times, one_s, formula, numbers in (
        ("reduces", once.reduces, reduce_s, "times·(2·(n − 1)·α + 2·(n − 1)/n·bytes/β)",
         {"n": once.tensor, "bytes": once.reduced_bytes, "α": near.alpha_s, "β": near.effective_bytes_per_s}),
        ("exchanges", once.exchanges, exchange_s, "times·((n − 1)·α + (n − 1)/n·bytes/β)",
         {"n": once.exchange_devices, "bytes": once.exchanged_bytes, "α": near.alpha_s, "β": near.effective_bytes_per_s}),
        ("sends", once.sends, send_s(once.sent_bytes, far), "times·(α + bytes/β)",
         {"bytes": once.sent_bytes, "α": far.alpha_s, "β": far.effective_bytes_per_s}),
    ):  # fmt: skip
        if not times:
            continue
        link = once.far_link if kind == "sends" else once.link
        symbol = f"{name}_{kind}_s"
        terms.add("time", symbol, times * one_s, "s", formula, f"{link.kind} link: {link.source}", **numbers, times=times)
        parts.append(symbol)
    return parts
