"""What is drawn in a load, what several clients ask together, conversations, and recorded traces."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from twostroke.bench.load_spec import read_clients
from twostroke.core.errors import ConfigError
from twostroke.planner.serving.drawn import (
    Constant,
    Exponential,
    Gamma,
    Lognormal,
    Mixture,
    Pareto,
    Uniform,
    Weibull,
    gaps_of,
    lengths_of,
    mean_length,
)
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.simulation import simulate
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.serving.traces import read_trace
from twostroke.planner.serving.workload import Client, Turns, Workload


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", Uniform(64, 64)),
        ("32:128", Uniform(32, 128)),
        ("lognormal:300,0.8", Lognormal(300, 0.8)),
        ("exponential:200,900", Exponential(200, 900)),
        (
            "0.9*lognormal:300,0.8+0.1*pareto:1000,1.5,8000",
            Mixture(((0.9, Lognormal(300, 0.8)), (0.1, Pareto(1000, 1.5, 8000)))),
        ),
    ],
)
def test_lengths_are_read_from_their_text(text: str, expected: object) -> None:
    assert lengths_of(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "many", "9:3", "0", "lognormal", "lognormal:3", "lognormal:3,1,2,3", "lognormal:0,1", "exponential:nan", "pareto:5,0",
     "0*64+1*32", "x*64", "exponential:5,2.5", "exponential:5,0", "64+", "1e400"],
)  # fmt: skip
def test_lengths_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        lengths_of(text)


@pytest.mark.parametrize(
    "text", ["", "bursts", "gamma", "gamma:", "gamma:0", "gamma:-1", "gamma:inf", "weibull:1e-9", "poisson:2", "gamma:1,2"]
)
def test_gaps_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        gaps_of(text)


@pytest.mark.parametrize(
    ("text", "variance"),
    [("poisson", 1.0), ("gamma:0.25", 4.0), ("gamma:4", 0.25), ("constant", 0.0),
     # Weibull of shape k and mean 1: Γ(1 + 2/k) ÷ Γ(1 + 1/k)² − 1
     ("weibull:0.7", math.gamma(1 + 2 / 0.7) / math.gamma(1 + 1 / 0.7) ** 2 - 1)],
)  # fmt: skip
def test_gaps_have_the_rates_mean_and_their_forms_variance(text: str, variance: float) -> None:
    times = [a.at_s for a in Workload.open(5.0, 4000, 1, 1, gaps=text).arrivals]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # 4,000 draws: standard error of the mean 3% at a variance of 4, and of the variance about 11%; four of them.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.13)
    assert statistics.variance(gaps) == pytest.approx(0.04 * variance, rel=0.45, abs=1e-12)


def test_drawn_lengths_have_their_forms_quantiles() -> None:
    rng = random.Random(1)
    exponential = [Exponential(200).draw(rng) for _ in range(4000)]
    assert statistics.mean(exponential) == pytest.approx(200, rel=0.07)
    pareto = sorted(Pareto(1000, 1.5, 8000).draw(rng) for _ in range(4000))
    assert (pareto[0], pareto[-1]) == (1000, 8000)
    assert pareto[2000] == pytest.approx(1000 * 2 ** (1 / 1.5), rel=0.05)
    mixed = [lengths_of("3*10+1*20").draw(rng) for _ in range(4000)]
    assert mixed.count(10) == pytest.approx(3000, rel=0.05)
    assert Lognormal(100, 50.0, 500).draw(rng) <= 500  # e^50 is no length, and no overflow
    assert mean_length((100, 300)) == 200
    assert mean_length("exponential:200") == pytest.approx(200, rel=0.1)
    assert [type(gaps_of(text)) for text in ("poisson", "constant", "weibull:2")] == [Gamma, Constant, Weibull]


def test_turns_of_a_conversation_hold_what_came_before() -> None:
    workload = Workload.closed(2, 7, 100, 20, turns=Turns(3, 1.5))
    assert [a.prompt_tokens for a in workload.arrivals] == [100, 220, 340, 100, 220, 340, 100]
    assert [a.after for a in workload.arrivals] == [None, 0, 1, None, 3, 4, None]
    assert [a.at_s for a in workload.arrivals][:3] == [0.0, 1.5, 1.5]
    # Of 1,420 tokens of prompts and 140 of answers, later turns have 120 + 240 twice from before.
    assert workload.new_share == pytest.approx(1 - 720 / 1560)


def seconds(decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
    return 1e-3 + 1e-5 * sum(chunk.new for chunk in chunks)


def test_a_conversations_next_turn_comes_after_thinking_and_finds_its_past() -> None:
    found = simulate(
        Workload.closed(1, 3, 160, 32, turns=Turns(3, 10.0), turnaround_s=0.0), policy_of("twostroke"), seconds, 10**4
    )
    # One user: 3 prompts and 31 steps after each, 20 s of thinking between them.
    assert found.duration_s == pytest.approx(20 + 3 * 31e-3 + 3e-3 + 1e-5 * 3 * 161, rel=0.01)
    known = 176 + 368  # whole pages of 16 of the 191 and 383 tokens that were computed before
    assert found.prefix_hit_share == pytest.approx(known / (160 + 352 + 544))
    apart = simulate(Workload.closed(1, 3, 160, 32), policy_of("twostroke"), seconds, 10**4)
    assert apart.prefix_hit_share == 0


def test_conversations_of_others_are_not_found() -> None:
    found = simulate(Workload.open(math.inf, 8, 160, 32, turns=Turns(2)), policy_of("twostroke"), seconds, 10**4)
    assert found.prefix_hit_share == pytest.approx(176 / (160 + 352))


def test_a_cap_holds_conversations_back() -> None:
    found = simulate(Workload.open(math.inf, 8, 160, 32, turns=Turns(2), cap=2), policy_of("twostroke"), seconds, 10**4)
    assert found.peak_concurrency == 2


def test_clients_ask_at_their_own_rates_and_share_their_own_prefixes() -> None:
    clients = [Client(30.0, "constant", "200", "exponential:20,99", 64), Client(10.0, "gamma:0.5", "50:90", "7", turns=2)]
    workload = Workload.of_clients(clients, 1000)
    times = [a.at_s for a in workload.arrivals if a.after is None]
    assert times == sorted(times)
    first = [a for a in workload.arrivals if a.prompt_tokens == 200]
    assert {a.blocks for a in first} == {(0, 1, 2, 3)}
    assert workload.block_tokens == 16
    # 30 requests a second of the one, 20 of the other: 3 in 5.
    assert len(first) == pytest.approx(600, rel=0.12)
    assert max(times) == pytest.approx(20, rel=0.15)


def test_clients_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    file.write_text('[[client]]\nrate = 2\narrivals = "weibull:0.6"\nprompt_tokens = "10:20"\n[[client]]\nrate = 0.5\n')
    assert read_clients(file) == (Client(2.0, "weibull:0.6", "10:20"), Client(0.5))
    for text, sentence in (
        ("", "no client"), ("[[client]]\nrate = 0\n", "rate=0"), ("[[client]]\nrat = 1\n", "rat"), ("client = 3", "client"),
        ("[[client]]\n", "rate"), ("[[", "not TOML"), ('[[client]]\nrate = 1\narrivals = "x"\n', "poisson"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            read_clients(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_clients(tmp_path / "none")


def test_published_traces_are_read(assets: Path) -> None:
    rows = read_trace(assets / "traces/AzureLLMInferenceTrace_code.csv", 100)
    assert (len(rows), rows[0]["timestamp"], rows[0]["input_length"], rows[0]["output_length"]) == (100, 0.0, 4808, 10)
    assert rows[1]["timestamp"] == pytest.approx(52.0, abs=0.01)  # 18:17:03.980 to 18:17:04.032
    scaled = Workload.of_trace(read_trace(assets / "traces/mooncake_conversation_trace.jsonl", 3), scale=1 / 16)
    assert [a.prompt_tokens for a in scaled.arrivals] == [422, 458, 452]
    assert scaled.block_tokens == 32


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("t.jsonl", "", "holds no request"),
        ("t.jsonl", '{"timestamp": 1}\n', "line 1"),
        ("t.jsonl", json.dumps({"timestamp": 1, "input_length": 5, "output_length": 5}) + "\n[1]\n", "line 2"),
        ("t.jsonl", json.dumps({"timestamp": 1, "input_length": -5, "output_length": 5}), "line 1"),
        ("t.jsonl", json.dumps({"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}), "hash_ids"),
        ("t.csv", "a,b\n1,2\n", "columns TIMESTAMP"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,1\n", "line 2"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_trace(file, 10)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for file in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_trace(file, 10)
