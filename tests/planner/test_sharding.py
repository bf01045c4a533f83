"""What a rank holds: the ZeRO paper's table, cuts that add up to the whole model, and the mistakes of other calculators."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from machines import ideal_machine, small_llama
from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.core.units import GIB
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.plan import plan_training, training_memory
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import held, rank_state_bytes, stage_held, stages, stages_of
from twostroke.planner.work.params import count_parameters

STATE = ("weights", "gradients", "optimizer")


def state_bytes(spec: ModelSpec, shape: TrainingShape, layout: Layout) -> float:
    terms = training_memory(spec, shape, load_hardware("h100"), layout)
    return sum(terms[name] for name in STATE)


def moe_llama() -> ModelSpec:
    return small_llama(moe=MoeSpec(n_experts=8, top_k=2, d_expert=352))


# -- ZeRO -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "gb"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_a_7_5_billion_model_on_64_ranks_takes_what_the_zero_paper_says(zero: int, gb: float) -> None:
    """Figure 1 of arXiv 1910.02054: Ψ = 7.5 B, N = 64, K = 12."""
    spec = small_llama()
    scale = 7.5e9 / count_parameters(spec).total
    assert scale * state_bytes(spec, TrainingShape(dtype="fp16"), Layout(data=64, zero=zero)) / 1e9 == pytest.approx(
        gb, rel=4e-3
    )


def test_zero_3_is_not_ddp(assets: Path) -> None:
    """Llama-3-8B over 8 devices: 16 GB of state a rank, where DDP would need 128 and one device ours 160."""
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    n = count_parameters(spec).total
    assert state_bytes(spec, TrainingShape(), Layout(data=8, zero=3)) == pytest.approx(2 * n)
    assert state_bytes(spec, TrainingShape(), Layout(data=8)) == pytest.approx(16 * n)
    assert state_bytes(spec, TrainingShape(), SINGLE) == 20 * n


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_of_copies_holds_what_one_of_a_single_copy_does(zero: int) -> None:
    spec, one, several = moe_llama(), Layout(data=8, zero=zero), Layout(data=32, zero=zero, copies=4)
    assert state_bytes(spec, TrainingShape(), several) == state_bytes(spec, TrainingShape(), one)


def test_several_micro_batches_are_summed_in_fp32() -> None:
    """18 bytes a parameter, as Megatron-LM holds them, instead of 16."""
    n = count_parameters(small_llama()).total
    assert state_bytes(small_llama(), TrainingShape(grad_accumulation=2), Layout(data=2)) == pytest.approx(18 * n)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "each"),
    [
        ("adamw", "fp32", 16),
        ("adam", "fp32", 16),
        ("sgd", "fp32", 12),
        ("adamw", "pure_bf16", 8),
        ("sgd", "pure_bf16", 6),
        ("adamw8bit", "bf16", 2 + 4 + 2 + 2 * (1 + 4 / 256)),
        ("adamw", "bf16", 16),
    ],
)
def test_bytes_of_a_parameter_by_optimizer_and_precision(optimizer: str, dtype: str, each: float) -> None:
    n = count_parameters(small_llama()).total
    shape = TrainingShape(optimizer=optimizer, dtype=dtype)
    assert state_bytes(small_llama(), shape, Layout(data=2)) == pytest.approx(each * n)


# -- cuts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [small_llama(), small_llama(tied_embeddings=False, n_kv_heads=2), moe_llama()], ids=["tied", "gqa", "moe"]
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_matrices_of_all_ranks_add_up_to_the_model(spec: ModelSpec, tensor: int) -> None:
    shape = TrainingShape()
    parts = [stage_held(spec, shape, Layout(tensor=tensor), stage) for stage in stages(spec.n_layers, 1, 1)]
    cut = sum(part.matrices + part.expert_matrices for part in parts) * tensor
    # a router is not cut, and so is held by every rank
    routers = 0 if spec.moe is None else spec.n_layers * 8 * 256 * (tensor - 1)
    assert cut == pytest.approx(count_parameters(spec).block_matrices + routers)


def test_experts_are_shared_out_and_the_rest_is_not() -> None:
    spec, shape = moe_llama(), TrainingShape()
    stage = stages(spec.n_layers, 1, 1)[0]
    alone = stage_held(spec, shape, Layout(data=4), stage)
    spread = stage_held(spec, shape, Layout(data=4, expert=4), stage)
    assert spread.trained == alone.trained
    assert 4 * spread.trained_experts == alone.trained_experts
    state = rank_state_bytes(shape, Layout(data=4, expert=4, zero=3), spread)
    # experts have one holder each: ZeRO has nobody to share them with
    assert state["optimizer"] == pytest.approx(8 * (spread.trained / 4 + spread.trained_experts))


def test_every_pipeline_stage_together_holds_the_model_and_a_second_tied_head() -> None:
    for tied in (True, False):
        spec = small_llama(tied_embeddings=tied)
        first, last = (held(spec, "full", 16, (), 2.0, 1, 1, stage) for stage in stages(6, 2, 1))
        extra = 4096 * 256 if tied else 0
        assert first.trained + last.trained == pytest.approx(count_parameters(spec).total + extra)


@pytest.mark.parametrize(("pipeline", "interleave", "layers"), [(2, 1, (2, 3)), (3, 1, (1, 2, 2)), (4, 1, (0, 2, 1))])
def test_our_stages_hold_the_layers_that_are_there(pipeline: int, interleave: int, layers: tuple[int, ...]) -> None:
    """Of seven layers the first two have no experts. Of four stages two in the middle are alike, and one stands for both."""
    spec = small_llama(n_layers=7, tied_embeddings=False, moe=MoeSpec(8, 2, 352, layers=(2, 3, 4, 5, 6)))
    shape, layout = TrainingShape(gradient_sums=1, grad_accumulation=12), Layout(pipeline=pipeline, interleave=interleave)
    parts = [stage_held(spec, shape, layout, stage) for stage in stages_of(spec, shape, layout)]
    assert [part.trained_experts for part in parts] == [n * 8 * 3 * 352 * 256 for n in layers]
    if len(parts) == pipeline:
        assert sum(part.trained + part.trained_experts for part in parts) == count_parameters(spec).total


def test_the_fullest_of_our_stages_is_planned() -> None:
    """Two of four layers have experts: spread evenly each stage would hold those of one, and the last holds both."""
    spec = small_llama(n_layers=4, moe=MoeSpec(8, 2, 352, layers=(2, 3)))
    a_layer_more = 8 * 3 * 352 * 256 + 8 * 256 - 3 * 704 * 256  # experts and their router, instead of an MLP
    ours, others = (
        training_memory(spec, TrainingShape(gradient_sums=n), ideal_machine(), Layout(pipeline=2))["optimizer"] for n in (1, 0)
    )
    assert ours - others == pytest.approx(8 * a_layer_more)


def test_key_value_heads_are_held_by_several_devices_where_there_are_fewer() -> None:
    spec = small_llama(n_kv_heads=1)
    part = stage_held(spec, TrainingShape(), Layout(tensor=4), stages(6, 1, 1)[0])
    whole = 6 * ((4 + 2) * 64 * 256 + 256 * 256 + 3 * 704 * 256)
    assert part.matrices == whole / 4 + 6 * (2 * 64 * 256) * 3 / 4


def test_a_second_device_of_any_kind_never_needs_more_memory_each(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    shape = TrainingShape(1, 8192, 8, checkpointing="selective")
    h100 = load_hardware("h100")
    alone = sum(training_memory(spec, shape, h100).values())
    for layout in (
        Layout(data=2),
        Layout(data=2, zero=1),
        Layout(data=2, zero=2),
        Layout(data=2, zero=3),
        Layout(tensor=2),
        Layout(tensor=8),
        Layout(pipeline=2),
        Layout(pipeline=4, interleave=2),
    ):
        assert sum(training_memory(spec, shape, h100, layout).values()) < alone


def test_every_config_that_can_be_planned_can_be_planned_over_devices(assets: Path) -> None:
    h100 = load_hardware("h100")
    for path in sorted((assets / "configs/hf").glob("*.json")):
        spec = read_spec(path)
        experts = {"expert": 8} if spec.moe is not None and spec.moe.n_experts % 8 == 0 else {}
        layout = Layout(data=8, zero=3, **experts)
        for shape in (TrainingShape(1, 2048), TrainingShape(1, 2048, method="qlora", checkpointing="full")):
            plan = plan_training(spec, shape, h100, layout)
            assert 0 < plan.mfu < 0.75, path.name
            assert plan.peak_memory_bytes > 16 * count_parameters(spec).active / 64 * (shape.method == "full")


# -- known mistakes -------------------------------------------------------------------------------------------------------


def test_activations_of_an_8b_model_at_8k_have_no_square(assets: Path) -> None:
    """A formula without flash attention gives 354 GiB for one sequence."""
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    square = 5 * spec.n_heads * 8192**2 * spec.n_layers
    assert square / GIB == pytest.approx(320, rel=0.01)
    kept = training_memory(spec, TrainingShape(1, 8192), load_hardware("h100"), Layout(data=8, zero=3))["activations"]
    assert kept < 40 * GIB


def test_checkpointing_orders_memory_and_time(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    plans = [
        plan_training(spec, TrainingShape(1, 8192, checkpointing=policy), load_hardware("h100"), Layout(data=8, zero=3))
        for policy in ("none", "selective", "full")
    ]
    memory = [plan.memory_bytes["activations"] for plan in plans]
    times = [plan.step_time_s for plan in plans]
    assert memory[0] > memory[1] > 2 * memory[2]
    assert times[0] < times[1] < times[2]
    assert plans[0].hfu == plans[0].mfu
    assert 1.25 < plans[2].hfu / plans[2].mfu < 4 / 3  # the head is not computed again


def test_whole_logits_take_fourteen_bytes_each_and_chunks_hardly_any() -> None:
    spec = small_llama(vocab_size=128_256)
    shape = TrainingShape(2, 8192)
    whole = training_memory(spec, dataclasses.replace(shape, logits="whole"), load_hardware("h100"))
    chunked = training_memory(spec, shape, load_hardware("h100"))
    assert whole["loss"] == (2 + 3 * 4) * 2 * 8192 * 128_256
    assert chunked["loss"] < whole["loss"] / 8


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(tensor=3), "tensor=3 must divide n_heads=4"),
        (Layout(pipeline=8, data=2), "pipeline=8"),
        (Layout(data=2, expert=2), "dense"),
    ],
)
def test_layouts_that_do_not_divide_are_refused_by_the_plan_and_by_memory(layout: Layout, sentence: str) -> None:
    spec = small_llama(n_layers=5)
    for ask in (plan_training, training_memory):
        with pytest.raises(ConfigError, match=sentence):
            ask(spec, TrainingShape(), ideal_machine(), layout)


@pytest.mark.parametrize("device", ["core-i7-1185g7", "h100-sxm"])
def test_a_stage_may_hold_the_embedding_or_the_head_alone(device: str) -> None:
    """Six layers, an embedding and a head are eight pieces for eight stages."""
    spec, shape = small_llama(n_layers=6), TrainingShape(grad_accumulation=8)
    memory = training_memory(spec, shape, load_hardware(device), Layout(pipeline=8))
    assert all(0 <= value < float("inf") for value in memory.values())
