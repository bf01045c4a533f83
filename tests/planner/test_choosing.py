"""Choosing: limits reject, the objective ranks, and the factors of a loser's distance multiply to it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.planner.choosing.candidates import Candidate, Miss, behind, choose, lost_by, nearest_miss, reliefs


def candidate(device: str = "a", usd: float = 1.0, rate: float = 100.0, **changes: Any) -> Candidate:
    """A served model: ``usd`` an hour, ``rate`` tokens/s, so usd/(3600·rate)·10⁶ $ per million."""
    values = {
        "output_tok_per_s": rate,
        "cost_per_mtok_usd": usd * 1e6 / (3600 * rate),
        "e2e_s": 100 / rate,
        "energy_per_mtok_kwh": 1.0 / rate,
    }
    settings: dict[str, Any] = {
        "phase": "serve", "device": device, "label": device, "n_devices": 1, "layout": {}, "precision": "bf16", "batch": 8,
        "settings": {}, "memory_bytes": {}, "allowed_bytes": 1.0, "usd_per_hour": usd, "watts": 100.0, "values": values,
        "bound": "memory",
    }  # fmt: skip
    return Candidate(**(settings | changes))


def missing(limit: str, ratio: float, device: str = "a", **changes: Any) -> Candidate:
    return candidate(device, misses=(Miss(limit, ratio, 1.0, "s"),), **changes)


def test_the_factors_multiply_to_the_distance() -> None:
    winner = candidate(usd=2.0, rate=400.0, communication_share=0.1)
    loser = candidate("b", usd=3.0, rate=200.0, communication_share=0.4, bubble_share=0.2)
    found = behind(loser, winner, "cost")
    assert found.ratio == pytest.approx(1.5 * 2.0)  # 1.5× the price, half the tokens
    assert math.prod(found.factors.values()) == pytest.approx(found.ratio)
    assert found.factors["price"] == pytest.approx(1.5)
    assert found.factors["communication"] == pytest.approx(0.9 / 0.6)
    assert found.factors["bubble"] == pytest.approx(1 / 0.8)
    assert found.factors["memory"] == pytest.approx(2.0 / (0.9 / 0.6) * 0.8)


def test_the_largest_factor_is_the_cause() -> None:
    winner = candidate()
    assert behind(candidate(usd=5.0), winner, "cost").cause == "price"
    assert behind(candidate(rate=10.0), winner, "cost").cause == "memory"
    assert behind(candidate(rate=30.0, communication_share=0.7), winner, "throughput").cause == "communication"


def test_a_loser_on_a_good_device_lost_by_its_own_choice() -> None:
    winner = candidate(rate=100.0, batch=64)
    assert lost_by(candidate(rate=10.0, batch=4), winner, winner, "cost") == "batch"
    assert lost_by(candidate(rate=90.0, batch=64, precision="fp32"), winner, winner, "cost") == "precision"
    dear = candidate("b", usd=9.0)
    assert lost_by(candidate("b", usd=9.0, rate=99.0, batch=64), dear, winner, "cost") == "price"


def test_limits_reject_before_the_objective_ranks() -> None:
    cheap_but_late = missing("ttft", 1.2, usd=0.1)
    results, feasible = choose([cheap_but_late, candidate(usd=2.0), candidate("b", usd=1.0)], "cost")
    assert [c.device for c in feasible] == ["b", "a"]
    assert [r.device for r in results] == ["b", "a"]
    assert results[1].rejected == {"ttft": 1}
    assert results[0].behind is not None
    assert results[0].behind.ratio == 1.0


def test_ranking_is_the_same_in_any_order() -> None:
    """Ties fall by price an hour, devices and names, never by the order in which candidates came."""
    those = [candidate(d, batch=b) for d in ("b", "a", "c") for b in (8, 4)]
    _, forward = choose(those, "throughput")
    _, backward = choose(list(reversed(those)), "throughput")
    assert forward == backward
    assert (forward[0].device, forward[0].batch) == ("a", 4)


def test_the_nearest_miss_is_the_smallest_factor() -> None:
    results, feasible = choose([missing("ttft", 3.0), missing("tpot", 1.4, "b"), missing("memory", 1.1, "c")], "cost")
    assert feasible == []
    assert [r.device for r in results] == ["c", "b", "a"]
    nearest = nearest_miss(results)
    assert nearest is not None
    assert nearest.device == "c"


def test_a_relief_misses_one_limit_only() -> None:
    both = candidate("a", misses=(Miss("ttft", 1.1, 1.0, "s"), Miss("tpot", 1.1, 1.0, "s")))
    found = reliefs([both, missing("tpot", 2.0), missing("tpot", 1.5, "b"), missing("ttft", 4.0)])
    assert [(c.misses[0].limit, c.nearness) for c in found] == [("tpot", 1.5), ("ttft", 4.0)]


def test_a_miss_of_nothing_allowed_is_infinite_and_plain_data() -> None:
    miss = Miss("type", 1.0, 0.0, "fp8")
    assert miss.ratio == math.inf
    assert plain(miss)["ratio"] is None
    assert reliefs([candidate(misses=(miss,))]) == ()


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match="cost, time, throughput, energy"):
        choose([], "fame")  # type: ignore[arg-type]
