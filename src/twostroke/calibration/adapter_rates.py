"""What one adapter takes beyond its products, from whole training steps of LoRA: a plan of them lacks only that."""

from __future__ import annotations

from dataclasses import replace

from twostroke.core.profile import MachineProfile
from twostroke.planner.hardware.anchors import ADAPTER_ANCHOR, ADAPTER_RANK, layer_and_around
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.training.layout import SINGLE
from twostroke.planner.training.passes import optimizer_work
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import rank_layers
from twostroke.planner.training.stage_times import DIRECTIONS, anchor_ratios, passes_of, update_ratio
from twostroke.planner.work.params import adapter_parameters


def with_fitted_adapters(profile: MachineProfile) -> MachineProfile:
    """``profile`` with the seconds of one adapter forward, backward and in the update, and of compiling a block with adapters;
    as it is where no step of adapters was measured."""
    anchor, rates = ADAPTER_ANCHOR, profile.training
    mixed = next((step.dtype for step in rates.steps if step.method == "lora"), "bf16")
    shallow, deep = (rates.step(anchor.width, n, mixed, "compiled", "lora") for n in (anchor.shallow, anchor.deep))
    if shallow is None or deep is None:
        return profile
    plain = replace(rates, adapter_forward_s=None, adapter_backward_s=None, adapter_update_s=None)
    hardware, spec = hardware_from_profile(replace(profile, training=plain)), anchor.spec(anchor.deep)
    shape = TrainingShape(anchor.batch_size, anchor.sequence_length, dtype=mixed, method="lora", lora_rank=ADAPTER_RANK)
    planned, ratios = passes_of(spec, shape, hardware, SINGLE), anchor_ratios(spec, shape, hardware)
    n_adapters = sum(len(p.adapter_outputs) * p.calls for p in rank_layers(spec, 1, 1, shape.targets)[0].products)
    forward_s, backward_s = (
        max(0.0, layer_s / ratios.layer[direction] - planned.layer_s(direction)) / n_adapters
        for direction, (layer_s, _) in (
            (d, layer_and_around(anchor, shallow.direction_s(d), deep.direction_s(d))) for d in DIRECTIONS
        )
    )
    n_trained = adapter_parameters(spec, ADAPTER_RANK, shape.targets)
    update_s = deep.optimizer_s / update_ratio(n_trained, shape, hardware) - optimizer_work(spec, shape, hardware).seconds
    fitted = replace(
        rates,
        adapter_forward_s=forward_s,
        adapter_backward_s=backward_s,
        adapter_update_s=max(0.0, update_s) / (n_adapters * anchor.deep),
        adapter_compile_s=max(shallow.first_step_s - shallow.seconds, 1e-3),
    )
    return replace(profile, training=fitted)
