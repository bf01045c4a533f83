"""Options that plans know and our trainer does not: what each changes, and that a plan says it is planned only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from machines import ideal_machine, machine, small_llama
from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.policy import OFFLOAD_BLOCK
from twostroke.core.spec import ModelSpec
from twostroke.core.units import GIB
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.datasheet_rates import product_s
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import stages

LLAMA_8B = ModelSpec("llama", 128_256, 32, 4096, 32, 8, 128, 14_336, 131_072)
SHAPE = TrainingShape(1, 8192, dtype="pure_bf16")
FSDP = Layout(data=8, zero=3)


def plan(layout: Layout = FSDP, hardware: str = "h100", **changes: object) -> TrainingPlan:
    return plan_training(LLAMA_8B, dataclasses.replace(SHAPE, **changes), load_hardware(hardware), layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_in_backward": True}, "the optimizer in backward"),
        ({"offload_activations": "cpu"}, "activations in host memory"),
        ({"offload_optimizer": "cpu"}, "the optimizer in host memory"),
        ({"gradient_bits": 8}, "gradients sent in 8 bits"),
        ({"checkpointing": "selective_op"}, "recomputation selective_op"),
        ({"dtype": "mxfp8"}, "training in mxfp8"),
        ({"logits": "listed"}, "listed logits"),
    ],
)
def test_an_option_that_our_trainer_lacks_is_planned_only(changes: dict[str, object], words: str) -> None:
    assert words in plan(Layout(), "b200", **changes).planned_only


# -- memory ---------------------------------------------------------------------------------------------------------------


def test_an_optimizer_in_backward_holds_one_layers_gradients() -> None:
    kept, freed = (plan(Layout(), optimizer_in_backward=on, checkpointing="full") for on in (False, True))
    assert kept.peak_memory_bytes - freed.peak_memory_bytes > 0.5 * 2 * kept.parameters.total
    with pytest.raises(ConfigError, match="grad_accumulation=2"):
        TrainingShape(grad_accumulation=2, optimizer_in_backward=True)


def test_gradients_come_as_activations_go() -> None:
    """With many activations nothing of bf16 gradients is left at the peak; those that several passes add to stay."""
    assert plan(Layout()).memory_bytes["gradients"] == 0
    assert plan(Layout(), grad_accumulation=2).memory_bytes["gradients"] == 2 * plan().parameters.total


def test_activations_that_wait_on_the_host_leave_the_device_and_take_the_slot() -> None:
    there, here = plan(offload_activations="cpu"), plan()
    assert there.memory_bytes["activations"] < here.memory_bytes["activations"] / 4
    (traffic,) = (t for t in there.traffic if t.parallel == "host")
    assert traffic.seconds > 0
    assert there.step_time_s >= here.step_time_s


def test_listed_logits_are_held_in_the_working_type_with_a_chunk_more() -> None:
    """Nothing else is as large as the loss of an adapter's run without checkpointing, whose head is frozen."""
    chunked, listed, whole = (
        plan(Layout(), method="lora", logits=logits).memory_bytes["loss"] for logits in ("chunked", "listed", "whole")
    )
    assert listed == pytest.approx(SHAPE.sequence_length * LLAMA_8B.vocab_size * 2 * 9 / 8)
    assert chunked < listed < whole


@pytest.mark.parametrize(("changes", "gib"), [({}, 23.1), ({"offload_activations": "cpu"}, 21.8)])
def test_torchtunes_peaks_of_optimizers_in_backward(changes: dict[str, str], gib: float) -> None:
    """Llama 3.2 3B on an A100, 2×4096, compiled, checkpointing, chunks of listed logits: torchtune's README, 2024-11, rows that
    benchmarks/planner/training_published does not have. Offloading takes what all layers keep from the peak, the loss."""
    spec = ModelSpec("llama", 128_256, 28, 3072, 24, 8, 128, 8192, 131_072, tied_embeddings=True)
    shape = TrainingShape(2, 4096, dtype="pure_bf16", checkpointing="full", logits="listed", optimizer_in_backward=True)
    planned = plan_training(spec, dataclasses.replace(shape, **changes), load_hardware("a100-sxm-80gb"))  # type: ignore[arg-type]
    assert planned.peak_memory_bytes / GIB == pytest.approx(gib, rel=0.015)


def test_an_optimizer_on_the_host_holds_nothing_on_the_device_and_is_slow() -> None:
    there, here = plan(offload_optimizer="cpu", dtype="bf16"), plan(dtype="bf16")
    assert there.memory_bytes["optimizer"] == there.masters_bytes == 0
    assert there.optimizer_s > 3 * here.optimizer_s


def test_a_scratch_file_saves_what_it_holds_but_two_blocks_and_adds_what_moving_it_takes() -> None:
    spec, shape, hardware = small_llama(), TrainingShape(), ideal_machine(disk_cached_read_bytes_per_s=1e10)
    here = plan_training(spec, shape, hardware)
    there = plan_training(spec, dataclasses.replace(shape, offload_optimizer="disk"), hardware)
    state = 8 * here.parameters.total
    assert there.memory_bytes["optimizer"] == 2 * 8 * OFFLOAD_BLOCK
    assert there.offload is not None
    assert there.offload.saved_bytes == here.peak_memory_bytes - there.peak_memory_bytes
    assert there.offload.moved_bytes == there.offload_read_bytes_per_step == state
    assert there.offload.added_s == pytest.approx(2 * state / 1e10 + 2 * state / 1e11)  # copies, and sums at the bandwidth
    assert there.step_time_s == pytest.approx(here.step_time_s + there.offload.added_s)
    assert here.checkpoint_bytes == there.checkpoint_bytes


def test_activations_on_disk_leave_those_of_a_layer_in_memory_and_move_in_each_pass() -> None:
    spec, hardware = small_llama(), machine()
    here, once, twice = (
        plan_training(spec, TrainingShape(grad_accumulation=n, offload_activations=place), hardware)
        for n, place in ((1, "none"), (1, "disk"), (2, "disk"))
    )
    assert once.memory_bytes["activations"] < here.memory_bytes["activations"] / spec.n_layers + 2**23
    assert once.offload is not None
    assert twice.offload is not None
    assert twice.offload.moved_bytes == 2 * once.offload.moved_bytes
    assert twice.offload.file_bytes == once.offload.file_bytes
    assert once.forward_s > here.forward_s


def test_a_disk_that_cannot_keep_up_is_waited_for() -> None:
    shape, spec = TrainingShape(offload_optimizer="disk"), small_llama()
    fast, slow = (plan_training(spec, shape, machine(disk_write_bytes_per_s=rate)) for rate in (2e9, 1e7))
    small = plan_training(spec, shape, dataclasses.replace(machine(), memory_bytes=fast.peak_memory_bytes + 1))
    assert fast.offload is not None
    assert slow.offload is not None
    assert small.offload is not None
    assert slow.offload.added_s > fast.offload.moved_bytes / 1e7 - slow.forward_s - slow.backward_s
    assert small.offload.added_s == pytest.approx(fast.offload.added_s + fast.offload.moved_bytes / 2e9)  # read from the disk


def test_per_operation_checkpointing_lies_between_selective_and_full() -> None:
    plans = [plan(Layout(), checkpointing=policy) for policy in ("selective", "selective_op", "full")]
    kept = [p.memory_bytes["activations"] for p in plans]
    assert kept == sorted(kept, reverse=True)
    times = [p.backward_s for p in plans]
    assert times == sorted(times)
    under_fsdp = [plan(checkpointing=policy).backward_s for policy in ("selective", "selective_op")]
    assert under_fsdp[0] == under_fsdp[1]  # what torchtitan calls selective


# -- time -----------------------------------------------------------------------------------------------------------------


def test_eager_steps_are_slower_by_the_bytes_of_single_operators() -> None:
    slower = plan(compile=False).step_time_s / plan().step_time_s
    assert 1.08 < slower < 1.3  # published for 8B: 1.16 (torchtitan), 3B: 1.27 (torchtune)


@pytest.mark.parametrize(("dtype", "least", "most"), [("fp8", 1.1, 1.5), ("mxfp8", 1.15, 1.6), ("nvfp4", 1.2, 2.2)])
def test_narrow_products_gain_less_than_their_peak(dtype: str, least: float, most: float) -> None:
    assert least < plan(hardware="b200", dtype="bf16").step_time_s / plan(hardware="b200", dtype=dtype).step_time_s < most


def test_a_device_without_the_narrow_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8"):
        plan(hardware="a100", dtype="fp8")


def test_small_products_reach_less_and_experts_pay_for_their_tiles() -> None:
    h100 = load_hardware("h100")
    per_flop = [product_s(h100, "bf16", m, 4096, 4096) / m for m in (64, 512, 8192)]
    assert per_flop == sorted(per_flop, reverse=True)
    dense, grouped = product_s(h100, "bf16", 8192, 4096, 4096), product_s(h100, "bf16", 64, 4096, 4096, groups=128)
    assert grouped > 2 * dense  # half a tile of 128 rows is as much as the 64 that are there


# -- layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "pipeline", "interleave"), [(61, 16, 1), (61, 4, 4), (61, 8, 2), (62, 5, 1), (13, 6, 2)])
def test_uneven_stages_hold_all_layers_and_the_ends_no_more_than_others(layers: int, pipeline: int, interleave: int) -> None:
    found = stages(layers, pipeline, interleave)
    most = max(stage.n_layers for stage in found)
    assert most == -(-layers // (pipeline * interleave)) * interleave
    assert found[0].first
    assert found[-1].last
    assert found[-1].n_layers <= found[0].n_layers <= most
    assert found[0].n_layers + found[-1].n_layers + (pipeline - 2) * most >= layers


def test_61_layers_are_planned_on_16_stages(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/deepseek-ai--DeepSeek-V3_config.json")
    layout = Layout(data=128, zero=1, pipeline=16, expert=64)
    found = plan_training(
        spec, TrainingShape(1, 4096, 120, dtype="fp8", checkpointing="selective"), load_hardware("h100"), layout
    )
    assert layout.n_devices == 2048
    assert found.bubble_s > 0


def test_ranks_of_a_sequence_share_its_tokens_and_pass_keys_and_values_round() -> None:
    """(c−1)/c · 2·s·b·k·d·w a layer forward, twice that backward (anchors of ring attention, arXiv 2310.01889)."""
    c, one, four = 4, plan(logits="whole"), plan(Layout(data=2, zero=3, context=4), logits="whole")
    assert four.layout.n_devices == one.layout.n_devices
    assert four.tokens_per_step == one.tokens_per_step / 4
    assert four.memory_bytes["activations"] == pytest.approx(one.memory_bytes["activations"] / 4, rel=0.01)
    assert four.memory_bytes["optimizer"] == one.memory_bytes["optimizer"]
    (ring,) = (t for t in four.traffic if t.parallel == "context")
    assert ring.sent_bytes == pytest.approx(3 * (c - 1) / c * 2 * 8192 * 8 * 128 * 2 * 32)


def test_experts_of_other_nodes_are_reached_by_each_devices_own_port(assets: Path) -> None:
    """A row crosses once for both experts of the other node; 4,096 of 2,048 elements at 0.7 of 50 GB/s take 0.48 ms."""
    spec, h100 = read_spec(assets / "configs/hf/Qwen--Qwen3-30B-A3B_config.json"), load_hardware("h100")
    inside, across = (
        plan_training(spec, TrainingShape(1, 4096), h100, Layout(data=16, zero=1, expert=expert)) for expert in (8, 16)
    )
    once = [next(t.seconds / t.bursts for t in p.traffic if t.parallel == "expert") for p in (inside, across)]
    assert once[0] < 0.4e-3
    assert once[1] == pytest.approx(4096 * 2048 * 2 * (1 - 0.5**8) / 35e9, rel=0.02)  # and the first byte
