"""The smallest change that makes a run fit: it does fit, nothing smaller does, and there is none where nothing helps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from machines import small_llama
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec
from twostroke.planner.choosing.fitting import smallest_change
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.plan import plan_training, training_memory
from twostroke.planner.training.shape import TrainingShape

SHAPE = TrainingShape(8, 2048, logits="whole")
SPEC = small_llama(vocab_size=32_000, max_positions=2048)


def holding(gigabytes: float) -> Hardware:
    return dataclasses.replace(load_hardware("h100"), memory_bytes=gigabytes * 1e9)


def needed(spec: ModelSpec, shape: TrainingShape, layout: Layout = SINGLE) -> float:
    return sum(training_memory(spec, shape, load_hardware("h100"), layout).values())


@pytest.mark.parametrize(
    ("saving", "words"),
    [
        ({"logits": "chunked"}, "--logits chunked"),
        ({"logits": "chunked", "batch_size": 8, "checkpointing": "selective"}, "--batch-size"),
    ],
)
def test_it_fits_and_says_what_to_type(saving: dict[str, object], words: str) -> None:
    machine = holding(1.001 * needed(SPEC, dataclasses.replace(SHAPE, **saving)) / 1e9)  # type: ignore[arg-type]
    change = smallest_change(SPEC, SHAPE, machine, SINGLE)
    assert change is not None
    assert words in change.words
    assert change.memory_bytes <= machine.memory_bytes
    assert change.memory_bytes == needed(SPEC, change.shape, change.layout)
    assert change.step_time_s == plan_training(SPEC, change.shape, machine, change.layout).step_time_s
    assert change.sentence.startswith("The smallest change")


def test_sharding_over_ranks_that_are_there_comes_before_more_devices(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    change = smallest_change(spec, TrainingShape(1, 2048), load_hardware("h100"), Layout(data=8))
    assert change is not None
    assert change.layout.data == 8
    assert change.layout.zero > 0


def test_more_devices_read_as_many_tokens_a_step(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    shape = TrainingShape(1, 2048, 64)
    change = smallest_change(spec, shape, load_hardware("l40s"), SINGLE)
    assert change is not None
    assert change.layout.data > 1
    assert change.shape.tokens_per_step * change.layout.data == shape.tokens_per_step


def test_nothing_helps_where_the_sequence_alone_is_too_long() -> None:
    assert smallest_change(SPEC, TrainingShape(1, 2_000_000), holding(1), SINGLE) is None
