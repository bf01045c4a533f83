"""A device draws between idle and its limit, more the more it does; energy is its watts times time, and PUE stands apart."""

from __future__ import annotations

import csv
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import machine, small_llama
from twostroke.core.families import spec_from_config
from twostroke.planner.hardware.tables import hardware_names, load_hardware
from twostroke.planner.money.cost import cost_of, excluded_power
from twostroke.planner.money.power import Busy, busy_of, joules, mean_watts, reading_watts
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.component import Work

H100 = load_hardware("h100-sxm")
ANY = st.floats(0, 1, allow_nan=False)
MODELS = {
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B_config.json",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B_config.json",
    "Llama-3.1-405B": "meta-llama--Meta-Llama-3.1-405B_config.json",
    "Qwen3-8B": "Qwen--Qwen3-8B_config.json",
    "Qwen3-30B-A3B": "Qwen--Qwen3-30B-A3B_config.json",
}


@given(reading=ANY, computing=ANY, exchanging=ANY, name=st.sampled_from(hardware_names()))
def test_no_work_draws_less_than_idle_or_more_than_the_limit(
    reading: float, computing: float, exchanging: float, name: str
) -> None:
    device = load_hardware(name)
    watts = mean_watts((Busy(1.0, reading, computing, exchanging),), device)
    assert device.idle_watts.value * (1 - 1e-9) <= watts <= device.watts.value * (1 + 1e-9)


@given(reading=ANY, computing=ANY, more=ANY)
def test_more_work_in_the_same_time_never_draws_less(reading: float, computing: float, more: float) -> None:
    for busier in (Busy(1.0, reading + more, computing), Busy(1.0, reading, computing + more)):
        assert joules(busier, H100) >= joules(Busy(1.0, reading, computing), H100) * (1 - 1e-9)


def test_an_accelerator_that_waits_is_idle_and_one_that_computes_draws_its_limit() -> None:
    assert joules(Busy(2.0, 0.0, 0.0), H100) == 2 * 120
    assert joules(Busy(2.0, 0.0, 2.0), H100) == 2 * 700
    assert joules(Busy(2.0, 2.0, 0.0), H100) == pytest.approx(2 * (120 + 3.35e12 * 1.28e-10))


def test_a_processor_never_rests_inside_a_step() -> None:
    device = machine()
    assert joules(Busy(1.0, 0.0, 0.0), device) == pytest.approx(device.watts.value)
    assert joules(Busy(1.0, 1.0, 0.0), device) == pytest.approx(device.idle_watts.value + reading_watts(device))


def test_a_limit_counts_no_longer_than_the_work_takes() -> None:
    work = Work("mlp", 1.0, 1.0, arithmetic_s=3.0, memory_s=1.0, launch_s=0.0, seconds=2.0)
    assert busy_of((work, work)) == Busy(4.0, 2.0, 4.0)
    assert busy_of(()) == Busy(0.0, 0.0, 0.0)
    assert mean_watts((), H100) == 120


# -- plans -----------------------------------------------------------------------------------------------------------------


def llama(batch: int, device: str = "h100-sxm") -> ServingPlan:
    spec = replace(small_llama(), max_positions=4096)
    return plan_serving(spec, ServingShape(batch=batch, prompt_tokens=128, output_tokens=256), load_hardware(device))


def test_energy_of_served_tokens_is_watts_times_time_without_pue() -> None:
    plan = llama(8)
    assert plan.hardware.place == "data centre"
    assert plan.kwh_per_mtok == pytest.approx(plan.watts * 1e6 / plan.output_tok_per_s / 3.6e6)
    assert plan.cost_per_hour.energy_kwh == pytest.approx(plan.watts / 1000)
    assert plan.cost_per_hour.site_kwh == pytest.approx(1.58 * plan.watts / 1000)
    assert plan.cost_per_hour.watts.kind == "predicted"


def test_energy_of_training_is_watts_times_time_of_all_devices() -> None:
    shape = TrainingShape(batch_size=4, sequence_length=512, steps=100)
    one = plan_training(small_llama(), shape, H100)
    eight = plan_training(small_llama(), shape, H100, Layout(data=8))
    for plan, n, spent_s in ((one, 1, one.train_time_s), (eight, 8, eight.wall_time_s)):
        assert plan.cost is not None
        assert spent_s is not None
        assert plan.cost.energy_kwh == pytest.approx(n * plan.watts * spent_s / 3.6e6)
    assert eight.watts < one.watts  # it waits for gradients


def test_electricity_and_co2_are_of_the_site() -> None:
    cost = cost_of(3600, H100, watts=500.0)
    assert cost.energy_kwh == pytest.approx(0.5)
    assert cost.energy_usd == pytest.approx(0.5 * 1.58 * 0.15)
    assert cost.co2_kg == pytest.approx(0.5 * 1.58 * 0.45)
    assert cost_of(3600, H100).energy_kwh == pytest.approx(0.7)  # without work that is known, the limit


def test_what_energy_leaves_out_is_said_with_the_hosts_power_where_it_is_known() -> None:
    said = excluded_power(H100)
    assert "PUE 1.58" in said
    assert "575 W" in said
    assert "DGX H100" in said
    assert "the host" in excluded_power(load_hardware("rtx-4090"))


# -- public measurements ---------------------------------------------------------------------------------------------------


def planned_row(row: dict[str, str], configs: Path) -> tuple[float, str]:
    """(planned ÷ measured watts, "dense" or "experts") of a row; the length of prompts, which is not published, is guessed."""
    spec = spec_from_config(json.loads((configs / MODELS[row["model"]]).read_text(encoding="utf-8")))
    shape = ServingShape(
        batch=round(float(row["avg_batch"])), prompt_tokens=256 if row["task"] == "gpqa" else 128,
        output_tokens=round(float(row["avg_output"])), scheme="fp8" if row["precision"] == "fp8" else "bf16",
        tensor=int(row["gpus"]), expert=int(row["expert"]), engine="vllm",
    )  # fmt: skip
    plan = plan_serving(spec, shape, H100)
    return plan.devices * plan.watts / float(row["watts"]), "dense" if spec.moe is None else "experts"


def test_watts_of_served_models_are_within_12_percent_of_measured_ones(assets: Path) -> None:
    """84 rows of the ML.ENERGY leaderboard, five models on 1 to 8 H100s at batches of 8 to 1,019: medians, dense and experts
    apart. The board's limit instead is 31% too high (benchmarks/planner/energy)."""
    rows = list(csv.DictReader((assets / "profiles/serving_energy_h100.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 84
    errors: dict[str, list[float]] = {}
    for row in rows:
        ratio, kind = planned_row(row, assets / "configs/hf")
        errors.setdefault(kind, []).append(abs(ratio - 1))
    assert {kind: statistics.median(found) < 0.12 for kind, found in errors.items()} == {"dense": True, "experts": True}
