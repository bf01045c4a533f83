"""Collectives follow the ring's own count of messages and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from twostroke.planner import network


@dataclass(frozen=True)
class Wire:
    alpha_s: float = 1e-5
    effective_bytes_per_s: float = 1e9


WIRE = Wire()


def ring_by_hand(n_bytes: float, n: int, passes: int) -> float:
    """Walk the ring: each pass is n − 1 rounds in which every rank sends one n-th of the tensor to its neighbour."""
    return sum(WIRE.alpha_s + n_bytes / n / WIRE.effective_bytes_per_s for _ in range(passes) for _ in range(n - 1))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("n_bytes", [0, 1000, 4e8])
def test_rings_take_what_walking_them_takes(n: int, n_bytes: float) -> None:
    assert network.ring_all_reduce_s(n_bytes, n, WIRE) == pytest.approx(ring_by_hand(n_bytes, n, 2))  # type: ignore[arg-type]
    assert network.all_gather_s(n_bytes, n, WIRE) == pytest.approx(ring_by_hand(n_bytes, n, 1))  # type: ignore[arg-type]
    assert network.reduce_scatter_s(n_bytes, n, WIRE) == pytest.approx(ring_by_hand(n_bytes, n, 1))  # type: ignore[arg-type]


def test_one_rank_sends_nothing() -> None:
    assert network.all_reduce_sent_bytes(1e9, 1) == network.gather_sent_bytes(1e9, 1) == 0
    assert network.all_to_all_sent_bytes(1e9, 1) == network.all_to_all_s(1e9, 1, WIRE) == 0  # type: ignore[arg-type]


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert network.send_s(1e9, WIRE) == pytest.approx(1.00001)  # type: ignore[arg-type]
    assert network.all_to_all_s(8e9, 8, WIRE) == pytest.approx(7 * (1e-5 + 1))  # type: ignore[arg-type]
