"""What the simulation asks of each engine: seconds of a step by its content, the plan's own where the plan has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machines import machine, native, small_llama
from twostroke.core.families import read_spec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import strategy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_table import StepTable
from twostroke.planner.serving.strategy import Chunk, Strategy

SHAPE = ServingShape(batch=8, prompt_tokens=300, output_tokens=100)


def hardware(name: str) -> Hardware:
    if name in ("native", "torch"):
        return native() if name == "native" else machine()
    return load_hardware(name)


@pytest.fixture(params=["native", "torch", "h100", "b200"])
def engine(request: pytest.FixtureRequest) -> Strategy:
    return strategy_of(small_llama(), SHAPE, hardware(request.param))


def test_a_decode_step_and_a_prompt_alone_are_the_plans(engine: Strategy) -> None:
    assert engine.step_seconds(SHAPE.batch, SHAPE.context, ()) == pytest.approx(engine.decode_s(), rel=1e-9)
    assert engine.step_seconds(0, 0.0, [Chunk(0, 300)]) == pytest.approx(engine.prefill_s(), rel=1e-9)


def test_a_prompt_in_chunks_is_the_plans(engine: Strategy) -> None:
    shape = replace(SHAPE, prompt_tokens=1200)
    whole = strategy_of(engine.spec, shape, engine.hardware)
    budget = whole.token_budget
    parts = [Chunk(at, min(budget, 1200 - at), at + budget >= 1200) for at in range(0, 1200, budget)]
    assert sum(whole.step_seconds(0, 0.0, [part]) for part in parts) == pytest.approx(whole.prefill_s(), rel=0.01)


def test_more_of_anything_takes_longer(engine: Strategy) -> None:
    alone = engine.step_seconds(4, 300.0, ())
    assert engine.step_seconds(5, 300.0, ()) >= alone
    assert engine.step_seconds(4, 400.0, ()) >= alone
    mixed = engine.step_seconds(4, 300.0, [Chunk(0, 100)])
    assert mixed > alone
    assert mixed > engine.step_seconds(0, 0.0, [Chunk(0, 100)])
    assert engine.step_seconds(4, 300.0, [Chunk(0, 100), Chunk(0, 100)]) > mixed
    assert engine.step_seconds(4, 300.0, [Chunk(200, 100)]) > mixed


def test_a_mixed_step_reads_the_weights_once(engine: Strategy) -> None:
    apart = engine.step_seconds(4, 300.0, ()) + engine.step_seconds(0, 0.0, [Chunk(0, 100)])
    assert engine.step_seconds(4, 300.0, [Chunk(0, 100)]) < apart


def test_two_equal_prompts_are_one_pass_of_both() -> None:
    """On a datasheet's device chunks of different kinds are counted as so many of one kind: rows and pairs stay the same."""
    engine = strategy_of(small_llama(), SHAPE, load_hardware("h100"))
    mixed = engine.step_seconds(0, 0.0, [Chunk(0, 300), Chunk(0, 100)])
    assert engine.step_seconds(0, 0.0, [Chunk(0, 200)] * 2) < mixed < engine.step_seconds(0, 0.0, [Chunk(0, 300)] * 2)


def test_the_table_is_exact_at_small_numbers_and_close_between_knots(engine: Strategy) -> None:
    table = StepTable(engine.step_seconds)
    assert table(8, 350.0, ()) == pytest.approx(engine.step_seconds(8, 350, ()), rel=0.01)
    assert table(0, 0.0, [Chunk(0, 300)]) == engine.step_seconds(0, 0.0, [Chunk(0, 300)])
    for decoding, context in ((3, 77), (45, 500), (100, 1000)):
        exact = engine.step_seconds(decoding, context, ())
        assert table(decoding, float(context), ()) == pytest.approx(exact, rel=0.02)
        beside = [Chunk(0, 200), Chunk(100, 50, False)]
        assert table(decoding, float(context), beside) == pytest.approx(
            engine.step_seconds(decoding, context, beside), rel=0.02
        )


def test_the_table_works_a_kind_of_step_out_once() -> None:
    asked = []

    def counted(decoding: int, context: float, beside: object) -> float:
        asked.append((decoding, context, beside))
        return 1.0 + decoding + context

    table = StepTable(counted)
    for context in range(512, 528):
        assert table(7, context + 0.5, ()) == pytest.approx(8.5 + context)
        table(7, float(context), [Chunk(0, 10)])
    assert len(asked) == 3  # two knots of decoding, one mixed


@pytest.mark.parametrize("name", ["Qwen--Qwen3-30B-A3B_config.json", "openai--gpt-oss-20b_config.json"])
def test_a_model_of_experts_or_windows_is_asked_too(assets: Path, name: str) -> None:
    engine = strategy_of(read_spec(assets / "configs/hf" / name), SHAPE, load_hardware("h100"))
    assert engine.step_seconds(8, 350, [Chunk(0, 100)]) > engine.step_seconds(8, 350, ()) > 0
