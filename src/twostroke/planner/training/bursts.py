"""The most bytes that a rank sends in a short window, from the bursts of a step.

Bursts of b bytes, each of which takes the wire t seconds, follow each other a = max(t, the work between them) apart. The window
w that holds most of k of them begins with one, and so holds

    min(k, ⌊w/a⌋)·b + min(1, (w − ⌊w/a⌋·a)/t)·b        (the last term only if fewer than k are whole),

or what the bursts at an end of the pass send, between which nothing is left to compute, if that is more. What hides behind the
same pass is under way together: the sum, at most what the wire carries in w. Held against counters of the wire in
benchmarks/network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from twostroke.planner.training.communication import Traffic


def most_sent_bytes(traffic: Iterable[Traffic], window_s: float) -> float:
    """The most bytes of ``traffic`` in ``window_s``."""
    by_pass: dict[str, list[Traffic]] = {}
    for one in traffic:
        if one.sent_bytes:
            by_pass.setdefault(one.overlap, []).append(one)
    return max((_most_of_a_pass(together, window_s) for together in by_pass.values()), default=0.0)


def _most_of_a_pass(traffic: list[Traffic], window_s: float) -> float:
    rate = max(float(one.sent_bytes) / float(one.seconds) for one in traffic)
    return min(rate * window_s, sum(_most_of(one, window_s) for one in traffic))


def _most_of(traffic: Traffic, window_s: float) -> float:
    bursts = float(traffic.bursts)
    each, wire_s = float(traffic.sent_bytes) / bursts, float(traffic.seconds) / bursts
    in_a_row, apart_s = float(traffic.in_a_row) or bursts, max(wire_s, float(traffic.apart_s))
    whole = min(in_a_row, math.floor(window_s / apart_s))
    begun = min(in_a_row - whole, 1.0, (window_s - whole * apart_s) / wire_s)
    return max(each * (whole + begun), float(traffic.together_bytes))
