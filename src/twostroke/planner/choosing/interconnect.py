"""What a fast link costs and whether the work uses it: the money that buys NVLink for a model that fits one device.

Between two devices the one with the faster link mostly has more of everything, so its price cannot be taken apart by
arithmetic alone: over the price table a regression on capacity, bandwidth, arithmetic and link leaves the link's own price
undetermined, since the four grow together. Two numbers are given instead. The *split* is an assumption: each resource's part of
the price difference is as its ratio's logarithm is to the sum of the four, so that doubling any one of them costs the same.
The *break-even* price assumes nothing: what the link-rich device may cost an hour if its tokens are to cost what they cost on
the other. All beyond it buys nothing that this work uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from twostroke.core.described import As
from twostroke.planner.choosing.candidates import Behind, Candidate, DeviceResult
from twostroke.planner.hardware.device import Hardware


@dataclass(frozen=True)
class LinkFinding:
    """A device with a fast link against the best one without, each in its own best layout for the same work.

    $ are for one device and hour. ``link_usd`` is the assumed split's part of the price difference, ``idle_usd`` what of it
    the layout leaves unused, ``break_even_usd`` and ``excess_usd`` = price − break-even assume nothing but the rates.
    """

    DOCUMENT = (
        "device against link_bytes_per_s against_link_bytes_per_s link_use price_difference_usd_per_hour "
        "link_part_usd_per_hour idle_link_usd_per_hour split break_even_usd_per_hour excess_usd_per_hour cost_ratio"
    )

    rich: Candidate
    plain: Candidate
    rich_link_bytes_per_s: Annotated[float, "bytes/s", As("link_bytes_per_s")]
    plain_link_bytes_per_s: Annotated[float, "bytes/s", As("against_link_bytes_per_s")]
    difference_usd: Annotated[float, "$", "a device-hour", As("price_difference_usd_per_hour")]
    link_usd: Annotated[float, "the link's part of it, by an assumed split", As("link_part_usd_per_hour")]
    idle_usd: Annotated[float, "what of that is unused", As("idle_link_usd_per_hour")]
    break_even_usd: Annotated[
        float, "what the device's hour is worth at the other's price a token", As("break_even_usd_per_hour")
    ]

    split: Annotated[str, "how the part was found"] = (
        "assumed: by the logarithms of the ratios of capacity, bandwidth, arithmetic and link"
    )

    @property
    def device(self) -> Annotated[str, "with the link"]:
        return self.rich.device

    @property
    def against(self) -> Annotated[str, "without"]:
        return self.plain.device

    @property
    def link_use(self) -> Annotated[float, "share that the work keeps busy"]:
        return self.rich.link_use

    @property
    def cost_ratio(self) -> Annotated[float, "$ a token over the other's"]:
        return self.rich.score("cost") / self.plain.score("cost")

    @property
    def price_usd(self) -> float:
        """One link-rich device an hour."""
        return self.rich.usd_per_hour / self.rich.n_devices

    @property
    def excess_usd(self) -> Annotated[float, "price beyond that", As("excess_usd_per_hour")]:
        """What the device costs beyond what its tokens are worth at the plain one's price; negative where it is the bargain."""
        return self.price_usd - self.break_even_usd

    @property
    def wasted(self) -> bool:
        """Whether the difference is lost money: the link-rich device's tokens cost more."""
        return self.excess_usd > 0


def resources(hardware: Hardware) -> dict[str, float]:
    """What a device's price buys: bytes, bytes/s, 16-bit FLOP/s, and bytes/s to its neighbours."""
    peaks = hardware.peak_flop_per_s
    return {
        "capacity": hardware.memory_bytes,
        "bandwidth": max(point.bytes_per_s for point in hardware.read_bandwidth),
        "arithmetic": peaks.get("bf16") or peaks.get("fp16") or max(peaks.values()),
        "link": hardware.link.bytes_per_s,
    }


def price_split(difference_usd: float, rich: Hardware, plain: Hardware) -> dict[str, float]:
    """``difference_usd`` over the resources of which ``rich`` has more, in proportion to ln(ratio). Empty where it costs
    no more or has more of nothing."""
    more = resources(rich)
    logs = {name: math.log(more[name] / value) for name, value in resources(plain).items() if more[name] > value}
    if difference_usd <= 0 or not logs:
        return {}
    return {name: difference_usd * part / sum(logs.values()) for name, part in logs.items()}


def link_finding(rich: Candidate, plain: Candidate, machines: Mapping[str, Hardware]) -> LinkFinding:
    """``rich`` against ``plain``, both with predicted money a token."""
    a, b = machines[rich.device], machines[plain.device]
    price = rich.usd_per_hour / rich.n_devices
    difference = price - plain.usd_per_hour / plain.n_devices
    link = price_split(difference, a, b).get("link", 0.0)
    idle, worth = link * (1 - rich.link_use), price * plain.score("cost") / rich.score("cost")
    return LinkFinding(rich, plain, a.link.bytes_per_s, b.link.bytes_per_s, difference, link, idle, worth)


def link_findings(results: Sequence[DeviceResult], machines: Mapping[str, Hardware]) -> tuple[LinkFinding, ...]:
    """Every device with a fast link that keeps the limits, against the cheapest a token without one; best device first. Empty
    where either kind is missing."""
    best = [r.best for r in results if r.best is not None and machines[r.device].kind == "gpu"]
    fast = [c for c in best if machines[c.device].link.is_fast]
    plain = [c for c in best if not machines[c.device].link.is_fast]
    if not plain:
        return ()
    cheapest = min(plain, key=lambda c: c.order("cost"))
    return tuple(link_finding(c, cheapest, machines) for c in fast)


def blame_idle_links(results: Sequence[DeviceResult], findings: Sequence[LinkFinding]) -> list[DeviceResult]:
    """``results``, best first, with the price factor of devices whose layout sends nothing taken apart.

    A device pays p/(p − idle) for the link that idles, by the assumed split; over the winner's own such factor that is
    "interconnect", and what is left is "price". Where the link is the largest factor, it is the cause, and candidates that had
    lost by the device's price are counted under it.
    """
    paid = {
        finding.rich.device: finding.price_usd / (finding.price_usd - finding.idle_usd)
        for finding in findings
        if finding.rich.link_use == 0 and finding.idle_usd > 0
    }
    if not results or not paid:
        return list(results)
    winner = paid.get(results[0].device, 1.0)
    return [results[0], *(_blamed(result, paid.get(result.device, 1.0) / winner) for result in results[1:])]


def _blamed(result: DeviceResult, link: float) -> DeviceResult:
    if result.behind is None or "price" not in result.behind.factors or link == 1.0:
        return result
    factors = {"interconnect": link} | result.behind.factors
    factors["price"] = result.behind.factors["price"] / link
    cause = max(factors, key=lambda name: factors[name])
    outranked = dict(result.outranked)
    if cause == "interconnect" and "price" in outranked:
        outranked["interconnect"] = outranked.pop("price")
    return replace(result, behind=Behind(result.behind.ratio, factors, cause), outranked=outranked)
