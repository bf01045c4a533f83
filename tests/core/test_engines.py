"""A plan is "planned only" exactly where the engines refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from machines import machine, small_llama
from twostroke.core.described import plain
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.engines import not_served, not_trained, planned_only_text
from twostroke.core.errors import ConfigError
from twostroke.core.families import PLANNED_FAMILIES, spec_from_config
from twostroke.core.optimizers import OPTIMIZERS
from twostroke.core.recipe import recipe_from_dict
from twostroke.core.schemes import PLANNED
from twostroke.planner.hardware.tables import hardware_names, load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import CACHE_DTYPES, ServingShape, Speculation
from twostroke.planner.text.serving import serving_text
from twostroke.planner.text.training import training_text
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.memory import PRECISIONS
from twostroke.planner.training.plan import plan_training
from twostroke.planner.training.shape import CHECKPOINTING, LOGITS, METHODS, OFFLOADS, TrainingShape

CPU, B200 = load_hardware("epyc-9654"), load_hardware("b200")


def refused(make: Any, *args: Any, **options: Any) -> bool:
    try:
        make(*args, **options)
    except ConfigError:
        return True
    return False


def recipe(**train: str) -> None:
    sizes = {"size": "explicit", "n_layers": 1, "d_model": 64, "n_heads": 1, "d_ff": 64}
    recipe_from_dict({"model": sizes, "data": {"sources": ["stdlib"]}, "train": {"steps": 1, **train}})


@pytest.mark.parametrize(
    ("key", "asked", "values"),
    [
        ("optimizer", "optimizer", OPTIMIZERS),
        ("dtype", "dtype", tuple(PRECISIONS)),
        ("activation_checkpointing", "checkpointing", CHECKPOINTING),
    ],
)
def test_training_is_planned_only_where_a_recipe_is_refused(key: str, asked: str, values: tuple[str, ...]) -> None:
    plans = {value: plan_training(small_llama(), TrainingShape(**{asked: value}), B200) for value in values}  # type: ignore[arg-type]
    assert {v for v, plan in plans.items() if plan.planned_only} == {v for v in values if refused(recipe, **{key: v})}


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_activations"])
def test_offload_is_planned_only_where_a_recipe_is_refused_and_on_accelerators(key: str) -> None:
    plans = {value: plan_training(small_llama(), TrainingShape(**{key: value}), CPU) for value in OFFLOADS}  # type: ignore[arg-type]
    assert (
        {v for v, plan in plans.items() if plan.planned_only} == {v for v in OFFLOADS if refused(recipe, **{key: v})} == {"cpu"}
    )
    assert plan_training(small_llama(), TrainingShape(**{key: "disk"}), B200).planned_only  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "asked", "values"), [("dtype", "scheme", PLANNED), ("kv_dtype", "kv_dtype", CACHE_DTYPES)])
def test_serving_is_planned_only_where_the_engine_refuses(key: str, asked: str, values: tuple[str, ...]) -> None:
    plans = {value: plan_serving(small_llama(), ServingShape(**{asked: value}), CPU) for value in values}  # type: ignore[arg-type]
    assert {v for v, plan in plans.items() if plan.planned_only} == {v for v in values if refused(EngineSettings, **{key: v})}


def test_what_no_option_of_train_asks_for_is_planned_only() -> None:
    spec = small_llama()
    assert all(not plan_training(spec, TrainingShape(method=method), CPU).planned_only for method in METHODS)
    assert [logits for logits in LOGITS if plan_training(spec, TrainingShape(logits=logits), CPU).planned_only] == [
        "listed",
        "whole",
    ]
    assert not plan_training(spec, TrainingShape(), CPU, Layout(data=2, zero=3)).planned_only
    over_two = plan_training(spec, TrainingShape(), CPU, Layout(data=2, zero=1, tensor=2))
    assert over_two.planned_only == ("training over 4 devices",)
    assert planned_only_text(over_two.planned_only) in " ".join(training_text(over_two, "x").split())
    assert plain(over_two)["planned_only"] == ["training over 4 devices"]


def test_what_no_option_of_serve_asks_for_is_planned_only() -> None:
    shape = ServingShape(prompt_tokens=64, output_tokens=16, speculation=Speculation(4, 0.8, 0.1), tensor=2, engine="vllm")
    plan = plan_serving(small_llama(), shape, load_hardware("h100"))
    assert plan.planned_only == (
        "one copy over 2 devices", f"inference on {load_hardware('h100').label}", "vllm's kernels",
    )  # fmt: skip
    assert planned_only_text(plan.planned_only) in " ".join(serving_text(plan, "x").split())
    here = plan_serving(small_llama(), ServingShape(prompt_tokens=64, output_tokens=16), machine())
    assert here.planned_only == ()
    assert "planned only" not in serving_text(here, "x")


def test_training_runs_on_what_torch_drives_and_inference_on_the_cpu_alone() -> None:
    devices = [load_hardware(name) for name in hardware_names()]
    spec = small_llama()
    trains = {d.name for d in devices if not not_trained(spec, accelerator=d.accelerator)}
    assert {"h100-sxm", "mi300x", "epyc-9654"} <= trains
    assert not trains & {"tpu-v5p", "apple-m4-max", "gaudi3", "trainium2"}
    assert {d.kind for d in devices if not not_served(spec, accelerator=d.accelerator)} == {"cpu"}


def test_every_family_that_is_not_built_is_planned_only(assets: Path) -> None:
    seen = set()
    for path in sorted((assets / "configs").rglob("*.json")):
        config = json.loads(path.read_text())
        if not isinstance(config, dict) or config.get("model_type") not in PLANNED_FAMILIES:
            continue
        try:
            spec = spec_from_config(config)
        except ConfigError:
            continue
        seen.add(spec.family)
        assert refused(spec.require_buildable)
        assert not_served(spec)[: len(spec.unbuilt_features)] == not_trained(spec) == spec.unbuilt_features
    assert len(seen) >= 6
