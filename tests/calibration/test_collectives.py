"""The ring's start-up and rate come back from times that were made with them, and from real ranks."""

from __future__ import annotations

import pytest

from machines import profile
from twostroke.calibration.collectives import SIZES_BYTES, fit_ring, measure_between_processes
from twostroke.core.rates import Ring
from twostroke.planner.hardware.device import Link
from twostroke.planner.hardware.network import ring_all_reduce_s
from twostroke.planner.hardware.tables import hardware_from_profile


@pytest.mark.parametrize("n_ranks", [2, 4, 16])
def test_a_ring_is_found_again_from_its_own_times(n_ranks: int) -> None:
    link = Link(5e-6, 2e10, "measured", "made up")
    points = [(float(s), ring_all_reduce_s(s, n_ranks, link)) for s in SIZES_BYTES]
    alpha_s, rate = fit_ring(points, n_ranks)
    assert alpha_s == pytest.approx(5e-6, rel=1e-6)
    assert rate == pytest.approx(2e10, rel=1e-6)


def test_noise_makes_nothing_negative() -> None:
    alpha_s, rate = fit_ring([(1e3, 1e-6), (1e6, 2e-3)], 2)
    assert alpha_s > 0
    assert 0 < rate < float("inf")


def test_a_profile_with_collectives_gives_a_measured_link() -> None:
    points = [(float(s), 1e-5 + s / 1e9) for s in SIZES_BYTES]
    rings = [Ring(*fit_ring(points, n_ranks), n_ranks) for n_ranks in (2, 4)]
    hardware = hardware_from_profile(profile(link=rings[0], network=rings[1]))
    assert (hardware.link.kind, hardware.network.kind) == ("measured", "measured")
    assert hardware.link.bytes_per_s == pytest.approx(1e9)  # 2(n−1)/n is 1 for two ranks
    assert hardware.network.bytes_per_s == pytest.approx(1.5e9)
    assert hardware.devices_per_node == 1, "ranks on a processor share it"


@pytest.mark.alone
def test_two_processes_measure_their_link() -> None:
    """A loopback between two processes passes more than 10 MB/s and less than memory's 1 TB/s, on any machine."""
    found = measure_between_processes(2, "cpu")
    assert found is not None
    assert found.ranks == 2
    assert 1e-7 < found.alpha_s < 1e-1
    assert 1e7 < found.bytes_per_s < 1e12
