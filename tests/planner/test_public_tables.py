"""The stored efficiencies are what public measured tables give, and hold for models that a fit has not seen."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from scripts import script
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.shape import Placement
from twostroke.planner.serving.step_time import efficiencies, efficiencies_table


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    return script("planner/public_tables/fit.py")


@pytest.fixture(scope="module")
def rows(fit: ModuleType, assets: Path) -> list[Any]:
    found, left_out = fit.read_rows(assets)
    assert len(found) + sum(left_out.values()) == 1640  # of 1972, 332 stand in another export too
    return found


@pytest.fixture(scope="module")
def expected(fit: ModuleType, assets: Path) -> Any:
    return fit.priors(fit.vidur_shares(assets, "h100", load_hardware("h100")))


def test_the_stored_constants_are_the_fitted_ones(fit: ModuleType, rows: list[Any], expected: Any) -> None:
    of = fit.constants(fit.fit(rows, expected), [p.name for p in expected])
    for engine in fit.ENGINES:
        for system, device in fit.SYSTEMS.items():
            fitted, stored = of(engine, system), efficiencies(engine, device)
            for name in fit.NAMES:
                # the fit stops where its cost moves by less than a hundred-thousandth; four digits are stored
                assert getattr(stored, name) == pytest.approx(getattr(fitted, name), rel=0.02), (engine, device, name)


def test_rows_at_once_are_what_they_are_one_by_one(fit: ModuleType, rows: list[Any], expected: Any) -> None:
    values, some = {p.name: p.value for p in expected}, rows[::97]
    of = fit.constants([math.log(p.value) for p in expected], [p.name for p in expected])
    alone = [fit.token_s(r.decode, r.mixed, of(r.engine, r.system), r.prompts_per_token) for r in some]
    assert list(fit.Table(some, told=False).predict(values)) == pytest.approx(alone)


def test_models_that_a_fit_has_not_seen_are_predicted_as_plans_say(fit: ModuleType, rows: list[Any], expected: Any) -> None:
    """Median error of TPOT without the row's model: at most 9% of dense models and 15% of experts, and as ``plan serve``
    says."""
    unseen = fit.held_out(rows, lambda r: r.model, expected)
    known = [r for r in rows if not r.hits]
    for kind, most in (("dense", 0.09), ("experts", 0.15)):
        error = median(abs(unseen[r.id] / r.tpot_s - 1) for r in known if r.kind == kind)
        assert error <= most
        assert efficiencies_table()["unseen_model_error"]["any"][kind] == pytest.approx(error, abs=0.005)


def test_rows_of_one_architecture_are_held_out_together(rows: list[Any]) -> None:
    checkpoints = {(r.model, r.precision) for r in rows if r.model == "Llama-3.1-8B"}
    assert len(checkpoints) == 2  # bf16 and fp8: neither may tell of the other


@pytest.mark.parametrize(
    ("columns", "placement"),
    [({"tp": "64", "attention_dp": "1", "moe_tp": "8", "moe_ep": "8"}, Placement(8, 1, 8)),
     ({"tp": "8", "attention_dp": "1", "moe_tp": "1", "moe_ep": "8"}, Placement(8, 1, 8)),
     ({"tp": "8", "attention_dp": "1", "moe_tp": "8", "moe_ep": "1"}, Placement(8, 1, 1)),
     ({"tp": "8", "attention_dp": "", "moe_tp": "2", "moe_ep": "4"}, Placement(8, 1, 4)),
     ({"tp": "4", "attention_dp": "4", "moe_tp": "1", "moe_ep": "16"}, Placement(1, 1, 4)),
     ({"tp": "1", "attention_dp": "64", "moe_tp": "8", "moe_ep": "8"}, Placement(1, 1, 8))],
)  # fmt: skip
def test_placements_are_read_as_the_exports_mean_them(fit: ModuleType, columns: dict[str, str], placement: Placement) -> None:
    """The first two are of one measurement in two exports; no node has 16 or 64 devices."""
    row = {f"{name}_size": value for name, value in columns.items()} | {"pp_size": "1"}
    assert fit.placement_of(row, "") == placement


def test_recipes_set_when_prompts_are_taken(rows: list[Any]) -> None:
    """Steps that prompts are held, looks for requests, and tokens of a step, in the launch scripts of one row each."""
    policy_with_recipe = script("planner/public_tables/recipes.py").policy_with_recipe

    def found(model: str, system: str, engine: str, **others: Any) -> list[tuple[int, int, int]]:
        asked = {"model": model, "system": f"{system}_sxm", "engine": engine, "mode": "agg", "inference_x": True} | others
        those = [r for r in rows if all(getattr(r, name) == value for name, value in asked.items())]
        policies = [policy_with_recipe(r) for r in those]
        return sorted({(p.taking.hold_steps, p.taking.every, p.token_budget) for p in policies})

    chat = {"prompt": 1024, "output": 1024}
    assert found("Llama-3.1-70B", "b200", "trtllm", precision="fp8", tensor=4, **chat) == [(20, 1, 16384)]
    assert found("Llama-3.1-70B", "b200", "trtllm", precision="fp8", tensor=8, **chat) == [(0, 1, 16384)]
    assert found("Llama-3.1-70B", "h200", "trtllm", tensor=2, **chat) == [(20, 1, 2248)]
    assert found("Llama-3.1-70B", "h200", "trtllm", tensor=2, prompt=1024, output=8192) == [(0, 1, 9416)]
    assert found("DeepSeek-V3", "b200", "sglang", precision="nvfp4", batch=8) == [(0, 10, 16384)]
    assert found("DeepSeek-V3", "b200", "sglang", precision="nvfp4", batch=32) == [(0, 30, 16384)]
    assert found("DeepSeek-V3", "h200", "sglang", batch=32) == [(0, 1, 32768)]
    assert found("DeepSeek-V3", "h200", "trtllm", batch=32, **chat) == [(0, 1, 1088)]
    assert found("Llama-3.1-70B", "h100", "vllm") == [(0, 1, 8192)]
    groups = [r for r in rows if r.inference_x and r.engine == "trtllm" and r.mode == "agg" and r.at.attention_groups > 1]
    assert {policy_with_recipe(r).taking.hold_prompts for r in groups} == {r.at.attention_groups for r in groups} == {4, 8}


def test_means_of_first_use_are_told_apart_from_loads(fit: ModuleType, rows: list[Any]) -> None:
    """InferenceX's rows of experts before it warmed servers up; dense models compile nothing at first use. What is between
    client and engine comes from the others."""
    cold = {(r.model, r.engine) for r in rows if r.is_cold and r.mode == "agg"}
    assert cold == {("DeepSeek-V3", "sglang"), ("DeepSeek-V3", "trtllm")}
    assert all("2025-11" <= r.measured < "2026" for r in rows if r.is_cold)
    assert {r.measured[:4] for r in rows if r.inference_x and not r.dense and not r.is_cold} == {"2026"}
    some = {r.id: r for r in rows if r.engine == "sglang" and r.mode == "agg" and r.inference_x}

    class First(NamedTuple):
        mean: float

    class Load(NamedTuple):
        ttft_s: First

    late_s = {i: 0.1 + 10.0 * r.is_cold for i, r in some.items()}
    loads = {i: (r, Load(First(r.ttft_s - late_s[i]))) for i, r in some.items() if r.ttft_s > late_s[i]}
    assert fit.front_ends_s(loads)["sglang"] == {"experts": pytest.approx(0.1)}
