"""Texts of plans keep to 80 columns, so that no terminal wraps them, and say first what a reader decides by."""

from __future__ import annotations

import pytest

from twostroke.core.families import named_model
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.under_load import latency_table
from twostroke.planner.text.serving import loaded_text, serving_text
from twostroke.planner.text.training import training_text
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.intervals import with_intervals


def served(name: str, device: str, tensor: int) -> ServingPlan:
    model = named_model(name)
    return plan_serving(model.spec, ServingShape(model.scheme or "bf16", 8, tensor=tensor), load_hardware(device))


def trained(name: str, device: str, data: int) -> TrainingPlan:
    layout = Layout(data=data, zero=3 if data > 1 else 0)
    return plan_training(named_model(name).spec, TrainingShape(steps=1000), load_hardware(device), layout)


SERVED = [("meta-llama/Llama-3.1-8B", "h100", 1), ("deepseek-ai/DeepSeek-R1", "h200", 8), ("Qwen/Qwen3-0.6B", "rtx-4090", 1)]
TRAINED = [("Qwen/Qwen3-0.6B", "h100", 1), ("meta-llama/Llama-3.1-8B", "h100", 8), ("Qwen/Qwen3-0.6B", "rtx-4090", 1)]


@pytest.mark.parametrize(("name", "device", "tensor"), SERVED)
def test_a_serving_plan_keeps_to_80_columns(name: str, device: str, tensor: int) -> None:
    plan = served(name, device, tensor)
    intervals = with_intervals(plan.prediction(), "datasheet", "serve")
    text = serving_text(plan, name, intervals, under_load=loaded_text(plan, None, latency_table(plan)))
    assert max(map(len, text.split("\n"))) <= 80


@pytest.mark.parametrize(("name", "device", "data"), TRAINED)
def test_a_training_plan_keeps_to_80_columns(name: str, device: str, data: int) -> None:
    plan = trained(name, device, data)
    text = training_text(plan, name, with_intervals(plan.prediction(), "datasheet", "train"), remedy="Use more.")
    assert max(map(len, text.split("\n"))) <= 80


def test_results_come_first_then_how_then_sources() -> None:
    plan = served(*SERVED[0])
    text = serving_text(plan, "x", with_intervals(plan.prediction(), "datasheet", "serve"))
    places = [text.index(words) for words in ("first token (TTFT)", "median error of TPOT", "\nmemory\n", "\nsources\n", "PUE")]
    assert places == sorted(places)


def test_results_of_training_come_first_too() -> None:
    plan = trained(*TRAINED[0])
    text = training_text(plan, "x", with_intervals(plan.prediction(), "datasheet", "train"))
    places = [text.index(words) for words in ("\nstep ", "right order", "\nmemory\n", "\nsources\n", "price listed")]
    assert places == sorted(places)


def test_numbers_of_one_device_and_of_all_say_so() -> None:
    text = serving_text(served(*SERVED[1]), "x")
    for words in ("on 8 × NVIDIA H200", "memory per device", "all 8 devices", "at 8 × $", "memory of each device"):
        assert words in " ".join(text.split())
    text = " ".join(training_text(trained(*TRAINED[1]), "x").split())
    for words in ("on 8 × NVIDIA H100", "memory per device", "all 8 devices together", "at 8 × $"):
        assert words in text
