"""Seconds and bytes of collectives and of sending, from a link's α (s a message) and β (bytes/s that collectives reach,
one direction a device: measured, or an assumed share of a datasheet's).

Ring algorithms: every one of n ranks sends (n−1)/n of the data a pass, in n−1 messages (Patarasuk & Yuan 2009). ``n_bytes`` is
the whole tensor: what is reduced, what has been gathered afterwards, or what one rank holds before an all-to-all.
With one rank everything is 0. Held against measured collectives of A100 and H100 in tests/planner/test_network.py.
"""

from __future__ import annotations

from twostroke.planner.hardware.device import Link


def all_reduce_sent_bytes(n_bytes: float, n: int) -> float:
    """2·(n−1)/n·S bytes that each rank sends."""
    return 2 * (n - 1) / n * n_bytes


def gather_sent_bytes(n_bytes: float, n: int) -> float:
    """(n−1)/n·S bytes that each rank sends in an all-gather, a reduce-scatter or an all-to-all."""
    return (n - 1) / n * n_bytes


def ring_all_reduce_s(n_bytes: float, n: int, link: Link) -> float:
    """2·(n−1)·α + 2·(n−1)/n·S/β seconds."""
    return 2 * (n - 1) * link.alpha_s + all_reduce_sent_bytes(n_bytes, n) / link.effective_bytes_per_s


def all_gather_s(n_bytes: float, n: int, link: Link) -> float:
    """(n−1)·α + (n−1)/n·S/β seconds, half an all-reduce. A reduce-scatter takes as long, the other way round."""
    return (n - 1) * link.alpha_s + gather_sent_bytes(n_bytes, n) / link.effective_bytes_per_s


def all_to_all_s(n_bytes: float, n: int, link: Link) -> float:
    """(n−1)·α + (n−1)/n·S/β seconds, S being what one rank holds."""
    return all_gather_s(n_bytes, n, link)


def send_s(n_bytes: float, link: Link) -> float:
    """α + S/β seconds from one rank to the next."""
    return link.alpha_s + n_bytes / link.effective_bytes_per_s
