"""The most that ranks send in a few milliseconds: measured, held to a pace, planned, and told."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ranked import RankRunner, laid_out, values_of
from test_compression import BIG

from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Link
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.bursts import most_sent_bytes
from twostroke.planner.training.communication import Traffic
from twostroke.planner.training.layout import layout_of
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.bursts import EVERY_S, QUIET_S, Bursts, most_sent

PACE_MBIT = 8.0

PACKET = 2**16
"""Bytes that loopback sends at once. Two of them are acknowledged together."""


def lines_of(recipe: TrainRecipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(recipe.output) / "log.jsonl").read_text().splitlines()]


def test_the_busiest_window_of_samples_is_found() -> None:
    samples = [(0.0, 0.0), (0.010, 10.0), (0.020, 110.0), (0.030, 110.0), (0.1, 120.0)]
    assert most_sent(samples, 0.010) == pytest.approx(100.0)
    assert most_sent(samples, 0.005) == pytest.approx(50.0)
    assert most_sent(samples, 0.020) == pytest.approx(110.0)
    assert most_sent(samples, 1.0) == pytest.approx(120.0)
    assert most_sent(samples[:1], 0.005) == 0.0


def test_what_connections_send_is_read_while_they_send_and_not_after() -> None:
    bursts = Bursts()
    with socket.create_server(("127.0.0.1", 0)) as server, bursts.connecting(rate_bytes_per_s=2e6):
        sending = socket.create_connection(server.getsockname())
        coming, _ = server.accept()
    # The first ten packets of a connection go out at once, whatever the rate.
    unpaced, n_bytes, came = 16 * PACKET, 500_000, 0

    def read() -> None:
        nonlocal came
        while came < unpaced + n_bytes:
            came += len(coming.recv(2**16))

    reader = threading.Thread(target=read)
    try:
        reader.start()
        bursts.peaks()
        bursts.begin()
        sending.sendall(bytes(unpaced))
        while came < unpaced:
            time.sleep(0.01)
        assert bursts.peaks()["peak_sent_50ms_bytes"] > 3 * 0.05 * 1e6
        began = time.monotonic()
        bursts.begin()
        sending.sendall(bytes(n_bytes))
        reader.join()
        # Both ends are in this process, and each is held to half of the rate.
        assert time.monotonic() - began > 0.8 * n_bytes / 1e6
        peaks = bursts.peaks()
        assert 0.05 * 1e6 <= peaks["peak_sent_50ms_bytes"] < 0.05 * 1e6 + 3 * PACKET
        assert 0 < peaks["peak_sent_5ms_bytes"] <= peaks["peak_sent_50ms_bytes"]
        # Soon nothing reads the counters any more: a thread that ran would hide that a rank hangs.
        deadline = time.monotonic() + 60
        while (seen := len(bursts._samples)) and time.monotonic() < deadline:
            time.sleep(2 * QUIET_S)
            if len(bursts._samples) == seen:
                break
        assert len(bursts._samples) == seen < 60 / EVERY_S
    finally:
        bursts.close()
        sending.close()
        coming.close()
    assert bursts.peaks() == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "bursts"]


@pytest.mark.parametrize("parallel", [{}, {"shard": 2}], ids=["replicas", "shards"])
def test_a_pace_flattens_bursts_and_leaves_the_bits(make_recipe: Any, runner: RankRunner, parallel: dict[str, Any]) -> None:
    recipe = make_recipe("run", model=BIG, dtype="fp32", steps=4, grad_accumulation=2)
    paced, free = laid_out(recipe, "paced", **parallel, pace_mbit=PACE_MBIT), laid_out(recipe, "free", **parallel)
    runner.train_each(2, [free])
    runner.train_each(2, [paced])
    assert values_of(Path(paced.output)) == values_of(Path(free.output))
    allowed = PACE_MBIT * 1e6 / 8 * 0.05 + 3 * PACKET
    for line in lines_of(paced)[1:]:
        assert line["peak_sent_50ms_bytes"] < allowed
        assert line["step_time_s"] > 0.8 * line["sent_bytes"] / (PACE_MBIT * 1e6 / 8)
    assert max(line["peak_sent_50ms_bytes"] for line in lines_of(free)) > max(
        line["peak_sent_50ms_bytes"] for line in lines_of(paced)[1:]
    )
    measured = json.loads((Path(paced.output) / "summary.json").read_text())["measurement"]
    assert measured["peak_sent_5ms_bytes"] <= measured["peak_sent_50ms_bytes"] < allowed
    whole = [line["computing_s"] + line["wire_s"] + line["waiting_s"] for line in lines_of(paced)]
    assert whole == pytest.approx([line["step_time_s"] for line in lines_of(paced)], rel=0.3)
    assert measured["wire_s"] > 0.3 * measured["step_time_s"], "a step waits for its pace"


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"pace_mbit": -1.0}, "parallel.pace_mbit=-1.0 must be at least 0"),
        ({"pace_mbit": float("inf")}, "and finite"),
        ({"pace_mbit": 100.0, "tensor": 2}, "parallel.tensor=2 has cuts whose traffic is waited for"),
        ({"pace_mbit": 100.0, "layout": "auto"}, 'parallel.layout="auto" may choose cuts'),
    ],
)
def test_wrong_paces_are_refused(parallel: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ParallelRecipe(**parallel)


# -- planned --------------------------------------------------------------------------------------------------------------


def stream(bursts: float, each: float, wire_s: float, apart_s: float = 0.0, overlap: str = "backward") -> Traffic:
    seconds = bursts * wire_s
    return Traffic("data", "x", 2, bursts, each, bursts * each, seconds, 0.0, overlap, "measured", apart_s, bursts)


def simulated(bursts: int, each: float, wire_s: float, apart_s: float, window_s: float) -> float:
    """The most in a window, by a curve of what was sent."""
    apart_s = max(wire_s, apart_s)
    curve = [(0.0, 0.0)]
    for n in range(bursts):
        curve += [(n * apart_s, n * each), (n * apart_s + wire_s, (n + 1) * each)]
    return most_sent(curve, window_s)


def test_the_busiest_window_is_that_of_a_simulated_wire() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n, wire_s, apart_s = rng.randint(1, 12), rng.uniform(1e-3, 40e-3), rng.choice([0.0, rng.uniform(1e-3, 80e-3)])
        window_s = rng.choice([0.005, 0.05])
        wanted = simulated(n, 1000.0, wire_s, apart_s, window_s)
        assert most_sent_bytes([stream(n, 1000.0, wire_s, apart_s)], window_s) == pytest.approx(wanted)


def test_what_hides_behind_one_pass_shares_the_wire() -> None:
    one, other = stream(4, 1000.0, 0.01, 0.05), stream(4, 1000.0, 0.01, 0.05)
    assert most_sent_bytes([one, other], 0.04) == 2000.0
    assert most_sent_bytes([one, other], 0.015) == 1500.0, "what the wire carries"
    assert most_sent_bytes([one, dataclasses.replace(other, overlap="forward")], 0.04) == 1000.0
    assert most_sent_bytes([], 0.04) == 0.0


def planned(mbit_per_s: float, **parallel: Any) -> TrainingPlan:
    """Of 22M parameters on processors that a link of a given rate connects."""
    spec = ModelSpec.from_dict(
        {"family": "llama", "vocab_size": 4096, "d_model": 384, "n_layers": 12, "n_heads": 6, "n_kv_heads": 6, "d_ff": 1024}
        | {"head_dim": 64, "max_positions": 512}
    )
    hardware = load_hardware("epyc-7763", "train")
    link = Link(2e-5, mbit_per_s * 1e6 / 8, "measured", "a test's")
    hardware = dataclasses.replace(hardware, link=link, network=link)
    recipe = ParallelRecipe(**{"data": 2} | parallel)
    shape = TrainingShape(batch_size=1, sequence_length=512, grad_accumulation=2, dtype="fp32", compile=False, gradient_sums=1)
    own = {name: getattr(recipe, name) for name in ("exact", "outer_every", "compress", "pace_mbit")}
    shape = dataclasses.replace(shape, outer_fragments=recipe.fragments, **own)
    return plan_training(spec, shape, hardware, layout_of(recipe, spec))


def peaks(plan: TrainingPlan) -> list[float]:
    prediction = plan.prediction()
    return [float(prediction[f"peak_sent_{ms}ms_bytes"]) for ms in (5, 50)]  # type: ignore[arg-type]


@pytest.mark.parametrize("parallel", [{}, {"data": 1, "shard": 2}, {"data": 1, "shard": 2, "zero": 2}])
def test_a_slow_link_is_the_bound_and_a_fast_one_is_not(parallel: dict[str, Any]) -> None:
    slow, fast = planned(10, **parallel), planned(1e6, **parallel)
    assert peaks(slow) == pytest.approx([10e6 / 8 * s for s in (0.005, 0.05)], rel=0.01)
    assert peaks(fast)[1] < 0.2 * 1e12 / 8 * 0.05
    assert peaks(fast)[1] <= fast.prediction()["sent_bytes_per_step"]


def test_fragments_and_paces_flatten_what_is_planned() -> None:
    ways: dict[str, Any] = {"exact": False, "outer_every": 8, "compress": "int4"}
    whole, parts = planned(4000, **ways), planned(4000, **ways, fragments=4)
    assert peaks(parts)[1] == pytest.approx(peaks(whole)[1] / 4, rel=0.05)
    assert parts.prediction()["sent_bytes_per_step"] == whole.prediction()["sent_bytes_per_step"]
    free, paced = planned(1000), planned(1000, pace_mbit=200.0)
    assert peaks(paced)[0] == pytest.approx(peaks(free)[0] / 5, rel=0.02)
    assert paced.step_time_s > free.step_time_s
    assert planned(1000, pace_mbit=5000.0).prediction() == free.prediction(), "the link is slower than the pace"


def test_what_is_not_known_is_not_planned() -> None:
    alone, tensor = planned(1000, data=1), planned(1000, data=1, tensor=2)
    assert not {"sent_bytes_per_step", "wire_s", "peak_sent_5ms_bytes"} & alone.prediction().keys()
    assert "peak_sent_5ms_bytes" not in tensor.prediction()
    found = tensor.prediction()
    assert found["computing_s"] + found["wire_s"] + found["waiting_s"] == pytest.approx(found["step_time_s"])  # type: ignore[operator]
