"""Adapters in serving plans: what they take of memory and add to a step, and how they are named on a command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from machines import ideal_machine, native, small_llama
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.matrices import ALL_LINEAR
from twostroke.planner.serving.adapters import ServedAdapters, adapters_in
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.params import adapter_parameters

Q_AND_V = ("q_proj", "v_proj")


def plan(*adapters: ServedAdapters, **changes: object) -> ServingPlan:
    return plan_serving(small_llama(), ServingShape(adapters=adapters, **changes), native())  # type: ignore[arg-type]


@pytest.mark.parametrize(("scheme", "element_bytes"), [("fp32", 4), ("bf16", 1), ("int8", 1), ("int4", 1)])
def test_memory_counts_both_factors_of_every_adapter(scheme: str, element_bytes: int) -> None:
    found = plan(ServedAdapters(3, 8, Q_AND_V), ServedAdapters(2, 16), scheme=scheme).memory_bytes["adapters"]
    spec = small_llama()
    numbers = 3 * adapter_parameters(spec, 8, Q_AND_V) + 2 * adapter_parameters(spec, 16, (ALL_LINEAR,))
    assert found == element_bytes * numbers
    assert "adapters" not in plan(scheme=scheme).memory_bytes


def test_a_step_takes_longer_by_what_its_requests_adapters_have_to_be_read() -> None:
    """Requests name adapters in turn: four of eight are read by four requests."""
    alone = plan(batch=4).step_s
    four, eight = (plan(ServedAdapters(n, 16), batch=4).step_s - alone for n in (4, 8))
    assert 0 < four == pytest.approx(eight)
    one = plan(ServedAdapters(1, 16), batch=4).step_s - alone
    assert one < four
    wide = plan(ServedAdapters(4, 32), batch=4).step_s - alone
    assert four < wide
    assert plan(ServedAdapters(4, 16, Q_AND_V), batch=4).step_s - alone < four


def test_a_prompt_pays_for_its_own_adapter_alone() -> None:
    none, one, eight = (plan(*adapters).ttft_s for adapters in ((), (ServedAdapters(1, 16),), (ServedAdapters(8, 16),)))
    assert none < one == pytest.approx(eight)


def test_a_plan_without_the_native_engine_says_what_it_leaves_out() -> None:
    shape = ServingShape(adapters=(ServedAdapters(2, 8),))
    planned = plan_serving(small_llama(), shape, ideal_machine())
    assert planned.memory_bytes["adapters"] > 0
    assert any("planned of the native engine alone" in note for note in planned.notes)


def test_an_adapter_of_no_matrix_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'q_proj'"):
        plan(ServedAdapters(1, 8, ("q_pro",)))


def test_descriptions_are_read() -> None:
    assert ServedAdapters.parse("8,16,q_proj,v_proj") == ServedAdapters(8, 16, Q_AND_V)
    assert ServedAdapters.parse("1,4") == ServedAdapters(1, 4, (ALL_LINEAR,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8", "must be NAME=DIR, or how many"),
        ("a,b", "must be NAME=DIR, or how many"),
        ("0,16", "count=0"),
        ("257,16", "count=257 of adapters must be at most 256"),
        ("1,513", "rank=513 of adapters must be at most 512"),
        ("1,-1", "rank=-1"),
    ],
)
def test_other_descriptions_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServedAdapters.parse(text)


def test_directories_are_described_by_their_configurations(tmp_path: Path) -> None:
    def adapter(name: str, **settings: object) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
        return tmp_path / name

    alike = [adapter(name, r=8, target_modules=["v_proj", "q_proj"]) for name in "ab"]
    other = adapter("c", r=4, target_modules=ALL_LINEAR)
    assert adapters_in([*alike, other]) == (ServedAdapters(2, 8, Q_AND_V), ServedAdapters(1, 4))
    with pytest.raises(ConfigError, match="is a pattern"):
        adapters_in([adapter("d", r=4, target_modules=r".*\.(q|v)_proj")])
    with pytest.raises(CorruptFileError, match="must be a whole number"):
        adapters_in([adapter("e", r="4", target_modules=["q_proj"])])
