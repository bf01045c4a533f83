"""What a training run will take: memory by term, time by pass and component, throughput, storage, network, energy, money."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from twostroke.core import engines
from twostroke.core.described import As, LeftOut
from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError
from twostroke.core.named import inputs, letter, named, within
from twostroke.core.parallel_recipe import check_pieces
from twostroke.core.policy import BURST_WINDOWS_MS
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.corrections import corrections_notes, learned_factor
from twostroke.planner.hardware.device import DATASHEET_NOTE, Hardware
from twostroke.planner.hardware.network import all_reduce_sent_bytes
from twostroke.planner.hardware.present import present_notes
from twostroke.planner.money.cost import Cost, cost_of
from twostroke.planner.money.power import Busy, busy_of, mean_watts
from twostroke.planner.training.bursts import most_sent_bytes
from twostroke.planner.training.checkpointing import Resilience, resilience
from twostroke.planner.training.communication import Traffic, across_data, shown_traffic, within_micro_batch
from twostroke.planner.training.datasheet_rates import peak_type
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.memory import FP32, PRECISIONS, attention_device, is_explicit, snapshot_bytes, state_bytes
from twostroke.planner.training.offload import activations_s, scratch_s
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import (
    Stage,
    offloaded_a_token,
    rank_shape,
    rank_state_bytes,
    stage_held,
    stages_of,
    training_memory,
)
from twostroke.planner.training.stage_times import StageTime, rate_dtype, stage_time, update_work
from twostroke.planner.work.component import Work, shown, total_seconds
from twostroke.planner.work.flops import attention_flops_per_token, training_flops_per_token
from twostroke.planner.work.params import (
    Parameters,
    active_adapter_parameters,
    adapter_parameters,
    check_targets,
    count_parameters,
)

ASSUMED_BATCH_S = 45e-6
"""Seconds to take a batch that was made in the background: 27 to 56 µs of 512 to 4,096 tokens on a Zen 4."""

ASSUMED_COMPILE_S = 20.0
"""Seconds to import torch and to compile one block, where nothing was measured."""


class TrainingMemory:
    """Bytes on the rank that holds most."""

    weights: Annotated[float, "bytes", "of masters and working copy"]
    gradients: Annotated[float, "bytes"]
    optimizer: Annotated[float, "bytes", "of its state"]
    activations: Annotated[float, "bytes", "kept for backward"]
    exchange: Annotated[float, "bytes", "of gradients that ranks have not added up yet, beyond activations", LeftOut]
    recomputed: Annotated[float, "bytes", "of the one layer being computed again, beyond what was kept of it", LeftOut]
    loss: Annotated[float, "bytes", "of logits and their gradients"]
    process: Annotated[float, "bytes", "resident at rest (CPU)"]
    workspace: Annotated[float, "bytes", "that training on a CPU holds beyond its tensors", LeftOut]
    expert_products: Annotated[float, "bytes", "of experts' products that oneDNN has compiled (CPU)", LeftOut]
    snapshot: Annotated[float, "bytes", "of the copy of a checkpoint that is being written (CPU)", LeftOut]
    gathered: Annotated[float, "bytes", "that ZeRO-3 holds whole for the moment", LeftOut]
    dequantised: Annotated[float, "bytes", "of QLoRA's largest matrix in the working type", LeftOut]
    peak: Annotated[float, "bytes", "of all terms"]


class TrainingPrediction:
    """Predictions of training, by their ledger names."""

    step_time_s: Annotated[float, "s", "of one update"]
    forward_s: Annotated[float, "s", "of all forward passes of a step"]
    backward_s: Annotated[float, "s", "of all backward passes of a step"]
    optimizer_s: Annotated[float, "s", "of the update"]
    data_s: Annotated[float, "s", "of reading a step's batch"]
    computing_s: Annotated[float, "s", "of a step of several ranks, in which a rank computes", LeftOut]
    wire_s: Annotated[float, "s", "of it, in which a rank waits for what travels", LeftOut]
    waiting_s: Annotated[float, "s", "of it, in which a rank waits for others", LeftOut]
    sent_bytes_per_step: Annotated[float, "bytes", "that a rank sends in a step, all collectives together", LeftOut]
    peak_sent_5ms_bytes: Annotated[float, "bytes", "of them in the busiest 5 ms, of data parallelism on CPUs", LeftOut]
    peak_sent_50ms_bytes: Annotated[float, "bytes", "of them in the busiest 50 ms, of data parallelism on CPUs", LeftOut]
    train_tok_per_s: Annotated[float, "tok/s", "of all devices"]
    mfu: Annotated[float, "share of peak, model FLOP"]
    peak_memory_bytes: Annotated[float, "bytes", "on the rank that holds most"]
    weights_bytes: Annotated[float, "bytes"]
    gradients_bytes: Annotated[float, "bytes"]
    optimizer_bytes: Annotated[float, "bytes"]
    activations_bytes: Annotated[float, "bytes"]
    checkpoint_bytes: Annotated[float, "bytes", "on disk"]
    model_bytes: Annotated[float, "bytes", "on disk"]
    checkpoint_wait_s: Annotated[float, "s", "of the run's steps for checkpoints before the last", LeftOut]
    offload_read_bytes_per_step: Annotated[float, "bytes", "from scratch files", LeftOut]
    offload_written_bytes_per_step: Annotated[float, "bytes", "to scratch files", LeftOut]
    startup_s: Annotated[float, "s", "before the first step"]
    train_time_s: Annotated[float, "s", "of the run; absent while its length is open", LeftOut]
    energy_kwh: Annotated[float, "kWh", "of the run, at the devices", LeftOut]
    cost_usd: Annotated[float, "$", "of the run", LeftOut]


@dataclass(frozen=True)
class Offloaded:
    """What scratch files change of a run."""

    saved_bytes: Annotated[float, "bytes", "of memory at the peak"]
    moved_bytes: Annotated[float, "bytes", "written to scratch files in a step, and as many read"]
    file_bytes: Annotated[float, "bytes", "of the scratch files"]
    added_s: Annotated[float, "s", "of a step"]


class TrainingPasses:
    """Passes of a step by component."""

    forward: Annotated[tuple[Work, ...], "one forward"]
    backward: Annotated[tuple[Work, ...], "one backward, recomputation included"]
    optimizer: Annotated[tuple[Work, ...], "one update"]


@dataclass(frozen=True)
class TrainingPlan:
    """Everything predicted of a run. Bytes and seconds are of one device, the one that holds most and the one that takes
    longest; ``works`` hold the three passes by component."""

    DOCUMENT = (
        "model shape layout hardware parameters trained_parameters planned_only prediction fits memory_bytes masters_bytes "
        "passes communication communication_s bubble_s tokens_per_step hfu wall_time_s flops_per_token bytes_per_token "
        "network_bytes_per_step offload resilience cost notes"
    )

    spec: Annotated[ModelSpec, "what is trained", As("model")]
    shape: Annotated[TrainingShape, "how"]
    hardware: Annotated[Hardware, "what they are"]
    parameters: Annotated[Parameters, "counts"]
    memory_bytes: dict[str, float]  # by term; "peak" is apart
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]  # what is computed again included
    optimizer: tuple[Work, ...]
    data_s: float
    startup_s: float
    flops_per_token: Annotated[float, "model FLOP"]
    bytes_per_token: Annotated[float, "bytes", "moved"]
    checkpoint_bytes: float
    model_bytes: float
    network_bytes_per_step: Annotated[float, "bytes", "a rank would send, were there one more"]
    cost: Annotated[Cost | None, "of the run; null while its length is open"]
    notes: Annotated[tuple[str, ...], "what to bear in mind"] = field(default=())
    layout: Annotated[Layout, "on which devices"] = SINGLE
    traffic: Annotated[tuple[Traffic, ...], "traffic of a step", As("communication")] = ()
    bubble_s: Annotated[float, "s", "that stages wait"] = 0.0
    recomputed_flops_per_token: float = 0.0
    masters_bytes: Annotated[float, "bytes", "of the weights that are fp32 masters"] = 0.0
    trained_parameters: Annotated[int, "parameters that the optimizer updates"] = 0
    resilience: Annotated[Resilience | None, "checkpoints and failures"] = None
    offload: Annotated[Offloaded | None, "scratch files"] = None

    @property
    def passes(self) -> Annotated[dict[str, tuple[Work, ...]], TrainingPasses, "time by component"]:
        return {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}

    @property
    def memory_and_peak(self) -> Annotated[dict[str, float], TrainingMemory, "bytes by term", As("memory_bytes")]:
        return {**self.memory_bytes, "peak": self.peak_memory_bytes}

    @property
    def forward_s(self) -> float:
        """Seconds of all forward passes of one step."""
        seconds = self.shape.grad_accumulation * total_seconds(self.forward)
        return named("forward_s", seconds, "s", "components one after another")

    @property
    def backward_s(self) -> float:
        seconds = self.shape.grad_accumulation * total_seconds(self.backward)
        return named("backward_s", seconds, "s", "components one after another, what is computed again included")

    @property
    def optimizer_s(self) -> float:
        return named("optimizer_s", total_seconds(self.optimizer), "s", "one update")

    @property
    def communication_s(self) -> Annotated[float, "s", "of a step that nothing hides"]:
        """Seconds of a step in which a device waits for a collective: the exposed part."""
        exposed = sum(t.exposed_s for t in self.traffic)
        return named("communication_s", exposed, "s", "the parts that work does not hide", section="communication")

    @property
    def _computing_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s + self.data_s

    def peak_sent_bytes(self, window_ms: int) -> float | None:
        """The most that a rank sends in a window; None of other cuts than replicas and shards, and on accelerators."""
        is_data = all(one.parallel == "data" for one in self.traffic)
        if not self.traffic or not is_data or self.hardware.accelerator is not None:
            return None
        most = most_sent_bytes(self.traffic, window_ms / 1e3)
        return named(
            f"peak_sent_{window_ms}ms_bytes", most, "bytes", "bursts and what is between them", section="communication"
        )

    def _over_ranks(self) -> dict[str, float | None]:
        """What a step of several ranks has beside; None of one. Stages wait for others; stragglers are not foreseen."""
        computing = named("computing_s", self._computing_s, "s", "passes, update and data, one after another")
        found = {"computing_s": computing, "wire_s": self.communication_s, "waiting_s": self.bubble_s}
        found["sent_bytes_per_step"] = self.network_bytes_per_step
        return {name: value if self.layout.n_devices > 1 else None for name, value in found.items()}

    @property
    def step_time_s(self) -> float:
        """forward + backward + optimizer + data, one after another, and over several devices exposed communication and the
        pipeline's bubble."""
        source = "one after another; what is hidden is left out"
        return named("step_time_s", self._computing_s + self.communication_s + self.bubble_s, "s", source)

    @property
    def tokens_per_step(self) -> Annotated[int, "tokens of one update"]:
        """Tokens of one step over all data-parallel ranks."""
        source = "gradients of all passes and replicas are summed before one update"
        return named("tokens_per_step", self.shape.tokens_per_step * self.layout.data, "tokens", source, "given")

    @property
    def tok_per_s(self) -> float:
        """Of the whole job."""
        return named("tok_per_s", self.tokens_per_step / self.step_time_s, "tok/s", "of the whole job")

    @property
    def planned_only(
        self,
    ) -> Annotated[tuple[str, ...], "what of it `twostroke train` does not do; empty where it does all of it"]:
        """What of it ``twostroke train`` does not do, in words; empty where it does all of it."""
        shape, accelerator, layout = self.shape, self.hardware.accelerator, self.layout
        on_disk: tuple[str, ...] = (f"offload to disk on {accelerator}",) if shape.uses_disk and accelerator is not None else ()
        if shape.uses_disk and (layout.n_devices > layout.data or layout.zero):
            on_disk += ("offload to disk by ranks that share a model",)
        return on_disk + engines.not_trained(
            self.spec, method=shape.method, dtype=shape.dtype, optimizer=shape.optimizer, recomputation=shape.checkpointing,
            logits=shape.logits, devices=1 if layout.is_trained(self.spec) else layout.n_devices, accelerator=accelerator,
        ) + shape.planned_only  # fmt: skip

    @property
    def mfu(self) -> float:
        """Model FLOP a second over the peaks of all devices."""
        dtype = rate_dtype(self.shape, self.hardware)
        peak = self.hardware.peak(peak_type(dtype)) * self.layout.n_whole
        source = f"π: {self.hardware.basis} rate of {dtype} products"
        return named("MFU", self.flops_per_token * self.tok_per_s / peak, "share", source, section="time")

    @property
    def hfu(self) -> Annotated[float, "share of peak, recomputation included"]:
        """As MFU, with what is computed again counted."""
        share = self.mfu * (1 + self.recomputed_flops_per_token / self.flops_per_token)
        return named("HFU", share, "share", "as MFU, with what is computed again counted", section="time")

    @property
    def peak_memory_bytes(self) -> float:
        """Sum of the terms: the process at rest, and everything that is alive when backward starts."""
        return named("peak_memory_bytes", sum(self.memory_bytes.values()), "bytes", "what is alive when backward starts")

    @property
    def watts(self) -> float:
        """Mean W of one device over a step, of the one that takes longest."""
        waited_s = self.data_s + self.bubble_s
        passes, exposed_s = (self.forward, self.backward), sum(t.exposed_s for t in self.traffic)
        return step_watts(passes, self.optimizer, self.shape.grad_accumulation, waited_s, exposed_s, self.hardware)

    @property
    def fits(self) -> Annotated[bool, "whether the device that holds most can hold it"]:
        return self.peak_memory_bytes <= self.room_bytes

    @property
    def room_bytes(self) -> float:
        """Memory that a rank may take: its device's, or its part of it."""
        return self.hardware.memory_bytes / self.layout.sharing

    @property
    def train_time_s(self) -> float | None:
        """Start-up and all steps; None while their number is open."""
        if not self.shape.steps:
            return None
        seconds = self.startup_s + self.shape.steps * self.step_time_s + (self.checkpoint_wait_s or 0.0)
        return named("train_time_s", seconds, "s", "importing and compiling, then all steps and their checkpoints")

    @property
    def checkpoint_wait_s(self) -> float | None:
        """What steps wait for checkpoints before the last: a copy in memory each, the first into new memory, or the disk where
        nothing is written in the background. Hashing and writing beside the steps is left out. None without any."""
        every, hardware = self.shape.checkpoint_every, self.hardware
        n_written = (self.shape.steps - 1) // every if every else 0
        if n_written < 1:
            return None
        size = self.checkpoint_bytes
        if not self.shape.snapshot:
            each_s = first_s = size / letter("writing", hardware.disk_write_bytes_per_s)
        else:
            each_s = 2.0 * size / hardware.bandwidth(2.0 * size)
            copied = hardware.weights.copied_bytes_per_s
            first_s = size / letter("copying", copied) if copied else each_s
        seconds = first_s + letter("more", n_written - 1) * each_s
        return named("checkpoint_wait_s", seconds, "s", "copies of weights and optimizer in memory", section="storage")

    @property
    def offload_read_bytes_per_step(self) -> float | None:
        return None if self.offload is None else self.offload.moved_bytes

    @property
    def offload_written_bytes_per_step(self) -> float | None:
        return None if self.offload is None else self.offload.moved_bytes

    @property
    def wall_time_s(self) -> Annotated[float | None, "s", "of the run with failures; null while its length is open"]:
        """``train_time_s`` and what failures and checkpoints are expected to add; None while the length is open."""
        if self.train_time_s is None or self.resilience is None:
            return self.train_time_s
        seconds = self.train_time_s * (1 + self.resilience.lost_share)
        return named("wall_time_s", seconds, "s", "with failures and checkpoints", section="storage")

    def prediction(self) -> Annotated[dict[str, float | dict[str, float]], TrainingPrediction, "the results"]:
        """Ledger names → values. What has no value while the length of the run is open is absent."""
        memory = {f"{term}_bytes": held for term, held in self.memory_bytes.items()}
        cost = {"energy_kwh": self.cost and self.cost.energy_kwh, "cost_usd": self.cost and self.cost.usd}
        peaks = {f"peak_sent_{ms}ms_bytes": self.peak_sent_bytes(ms) for ms in BURST_WINDOWS_MS}
        found: dict[str, Any] = {"train_tok_per_s": self.tok_per_s} | memory | cost | peaks | self._over_ranks()
        values = {name: found[name] if name in found else getattr(self, name) for name in TrainingPrediction.__annotations__}
        return {name: value for name, value in values.items() if value is not None}


# -- the plan -------------------------------------------------------------------------------------------------------------


def step_traffic(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, time: StageTime
) -> tuple[Traffic, ...]:
    """Everything a rank of the slowest stage sends in a step."""
    if layout.n_devices == 1 and shape.offload_activations != "cpu":
        return ()
    part, shape = stage_held(spec, shape, layout, time.stage), rank_shape(shape, layout)
    forward_s, backward_s = total_seconds(time.forward), total_seconds(time.backward)
    return shown_traffic(
        (
            *within_micro_batch(spec, shape, hardware, layout, time.stage),
            *across_data(spec, shape, hardware, layout, part, time.stage.n_layers, forward_s, backward_s),
            *to_host(spec, shape, hardware, layout, time.stage, forward_s, backward_s),
        )
    )


def to_host(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, stage: Stage, forward_s: float, backward_s: float
) -> list[Traffic]:
    """Activations that wait in the host's memory, once out and once back each micro-batch."""
    if shape.offload_activations != "cpu":
        return []
    there = shape.tokens_per_pass * offloaded_a_token(spec, shape, hardware, layout, stage)
    n_micro, (seconds, exposed) = shape.grad_accumulation, activations_s(there, forward_s, backward_s)
    what, overlap = "activations to the host and back", "behind forward and backward"
    bursts, each = 2 * n_micro * stage.n_layers, there / max(stage.n_layers, 1)
    return [Traffic("host", what, 1, bursts, each, n_micro * there, n_micro * seconds, n_micro * exposed, overlap, "assumed")]


def through_scratch_files(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout, time: StageTime, state: float,
    memory: Mapping[str, float],
) -> tuple[StageTime, Work | None, Offloaded]:  # fmt: skip
    """``time`` with what activations on disk add to both passes, what ``state`` bytes on disk add to an update, and what that
    is in all. ``memory`` is what the run holds beside."""
    plain = replace(shape, offload_activations="none", offload_optimizer="none")
    saved = sum(training_memory(spec, plain, hardware, layout).values()) - sum(memory.values())
    ranked = rank_shape(shape, layout)
    kept = ranked.tokens_per_pass * offloaded_a_token(spec, ranked, hardware, layout, time.stage)
    state, kept = (
        n_bytes if place == "disk" else 0.0
        for n_bytes, place in ((state, shape.offload_optimizer), (kept, shape.offload_activations))
    )
    passes, micro_s = shape.grad_accumulation, total_seconds(time.forward) + total_seconds(time.backward)
    file_bytes = state + kept * shape.tokens_at_once(hardware.kind, layout.n_devices) / shape.tokens_per_pass
    in_cache = sum(memory.values()) + file_bytes <= hardware.memory_bytes
    what = "copied to the system's memory and back, and summed twice; the disk where nothing hides it"
    added_s, update = 0.0, None
    if state:
        added_s = scratch_s(state, passes * micro_s, in_cache, hardware)
        update = Work.limited("disk", 0.0, 2 * state, 0.0, added_s).called("disk_update", what)
    if kept:
        pass_s = named("disk_pass_s", scratch_s(kept, micro_s, in_cache, hardware), "s", what)
        half = Work.limited("disk", 0.0, kept, 0.0, pass_s / 2)
        time = replace(time, forward=(*time.forward, half), backward=(*time.backward, half))
        added_s += passes * pass_s
    moved = state + letter("passes", passes) * kept
    moved = named("offload_bytes", moved, "bytes", "written to scratch files in a step, and read", section="storage")
    return time, update, Offloaded(saved, moved, file_bytes, added_s)


def bubble_of(shape: TrainingShape, layout: Layout, time: StageTime, traffic: tuple[Traffic, ...]) -> float:
    """(p − 1)/v ordinary stages' micro-batches, the time that a device waits for the pipe to fill and to empty: the share
    (p−1)/(v·m) of m micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2). Traffic inside a micro-batch waits too."""
    if layout.pipeline == 1:
        return 0.0
    inside = sum(t.exposed_s for t in traffic if t.parallel != "data") / shape.grad_accumulation
    waited = (layout.pipeline - 1) / layout.interleave * (letter("micro_batch", time.ordinary_s) + inside)
    source = "filling and emptying the pipeline; Narayanan et al., arXiv 2104.04473, section 2.2"
    return named("bubble_s", waited, "s", source, section="communication")


def unknown_type(shape: TrainingShape, hardware: Hardware) -> str | None:
    """The type whose rate a plan of ``shape`` lacks on ``hardware``; None if it is known."""
    kind = peak_type(rate_dtype(shape.on(hardware), hardware))
    return None if kind in hardware.peak_flop_per_s else kind


def plan_training(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout = SINGLE, mtbf_device_hours: float | None = None
) -> TrainingPlan:
    """Predict a training run of ``spec`` on ``layout.n_devices`` of ``hardware``. Raises ConfigError for a type it has no rates
    for and for a layout that does not divide the model.

    Held against published step times in tests/planner/test_training_published.py.
    """
    layout.check(spec)
    check_pieces(shape.sequence_length, layout.context)
    shape = shape.on(hardware)
    if shape.targets:
        check_targets(spec, shape.targets)
    parameters = count_parameters(spec)
    hardware.peak(peak_type(rate_dtype(shape, hardware)))
    time = stage_time(spec, shape, hardware, layout)
    update: tuple[Work, ...] = (update_work(spec, shape, hardware, layout),)
    traffic = step_traffic(spec, shape, hardware, layout, time)
    moved = shape.grad_accumulation * sum(w.bytes for w in (*time.forward, *time.backward)) + update[0].bytes
    trained = parameters.total if shape.method == "full" else adapter_parameters(spec, shape.lora_rank, shape.lora_targets)
    n_matrix = parameters.block_matrices if shape.method == "full" else trained
    state = state_bytes(trained, n_matrix, shape.optimizer, inputs(PRECISIONS[shape.dtype]).state)
    memory = training_memory(spec, shape, hardware, layout)
    offload = None
    if shape.uses_disk:
        time, disk, offload = through_scratch_files(spec, shape, hardware, layout, time, state, memory)
        update += () if disk is None else (disk,)
    stored = snapshot_bytes(shape.dtype, trained, state) + (FP32 * trained if shape.average else 0.0)
    if shape.compress_weights != "none":
        stored += letter("working", PRECISIONS[shape.dtype].working) * trained  # what all ranks compute with
    masters = max(
        rank_state_bytes(shape, layout, stage_held(spec, shape, layout, stage))["masters"]
        for stage in stages_of(spec, shape, layout)
    )
    with within("forward"):
        forward = shown(time.forward, "a pass over a micro-batch on the slowest stage")
    with within("backward"):
        backward = shown(time.backward, "a pass over a micro-batch on the slowest stage, what is computed again included")
    source = "weights as they are trained and the optimizer's state, of all ranks"
    stored = named("checkpoint_bytes", stored, "bytes", source, section="storage")
    written = "fp32" if shape.method != "full" else shape.saved_dtype or shape.compute_dtype  # adapters as they are trained
    finished = letter("w", bytes_of(written)) * trained
    plan = TrainingPlan(
        spec=spec,
        shape=shape,
        hardware=hardware,
        parameters=parameters,
        memory_bytes=memory,
        forward=forward,
        backward=backward,
        optimizer=update,
        data_s=batches_s(shape, hardware),
        startup_s=startup_s(shape, hardware),
        flops_per_token=flops_per_token(spec, shape),
        bytes_per_token=moved / shape.tokens_per_step * layout.context * layout.tensor * layout.pipeline,
        checkpoint_bytes=stored,
        model_bytes=named("model_bytes", finished, "bytes", "the finished model on disk", section="storage"),
        network_bytes_per_step=sum(t.sent_bytes for t in traffic)
        or all_reduce_sent_bytes(bytes_of(shape.compute_dtype) * trained, 2),
        cost=None,
        notes=(
            *spec.notes,
            *((*present_notes(hardware), *corrections_notes(hardware)) if hardware.basis == "measured" else (DATASHEET_NOTE,)),
        ),
        layout=layout,
        traffic=traffic,
        bubble_s=bubble_of(shape, layout, time, traffic),
        recomputed_flops_per_token=recomputed_flops_per_token(spec, shape, hardware),
        masters_bytes=masters,
        trained_parameters=trained,
        resilience=resilience(
            stored, hardware.disk_write_bytes_per_s * n_nodes(layout, hardware), layout.n_whole, mtbf_device_hours
        ),
        offload=offload,
    )
    if plan.train_time_s is not None:
        spent = plan.train_time_s if layout.n_whole == 1 else plan.wall_time_s
        assert spent is not None
        plan = replace(plan, cost=cost_of(spent, hardware, layout.n_paid, watts=plan.watts))
    return plan


def step_watts(
    passes: Iterable[Iterable[Work]], update: Iterable[Work], micro_batches: int, waited_s: float, exposed_s: float,
    hardware: Hardware,
) -> float:  # fmt: skip
    """Mean W of one device over a step: its passes, the update, waiting for others, and collectives that nothing hides."""
    each = (busy_of(works).times(micro_batches) for works in passes)
    others = Busy(waited_s, 0.0, 0.0), Busy(exposed_s, 0.0, 0.0, exposed_s)
    return mean_watts((*each, busy_of(update), *others), hardware)


def n_nodes(layout: Layout, hardware: Hardware) -> int:
    """Nodes that write their part of a checkpoint at once."""
    return -(-layout.n_whole // (layout.devices_per_node or hardware.devices_per_node))


def flops_per_token(spec: ModelSpec, shape: TrainingShape) -> float:
    """Model FLOP of a token. full: 6·N + 3·attention. Adapters: a frozen matrix has no gradient of its own, so 4·N_matrices
    for the base and 6 a parameter of the adapters, of experts those that a token passes."""
    if shape.method == "full":
        source = "2 forward, 4 backward"
        return named("flops_per_token", training_flops_per_token(spec, shape.sequence_length), "FLOP", source)
    adapters = active_adapter_parameters(spec, shape.lora_rank, shape.lora_targets)
    attention = attention_flops_per_token(spec, shape.sequence_length)
    flops = 4 * count_parameters(spec).in_products + 6 * adapters + 3 * attention
    source = "a frozen matrix has no gradient of its own: 2 forward, 2 backward; adapters 6"
    return named("flops_per_token", flops, "FLOP", source)


def recomputed_flops_per_token(spec: ModelSpec, shape: TrainingShape, hardware: Hardware) -> float:
    """FLOP of a token's second forward: the blocks' products and attention (full), explicit attention (selective)."""
    attention = attention_flops_per_token(spec, shape.sequence_length)
    if shape.checkpointing == "full":
        again = 2 * count_parameters(spec).active_matrices + attention
        return named("recomputed_flops_per_token", again, "FLOP", "a second forward; checkpointing full")
    dtype = shape.compute_dtype
    explicit = is_explicit(attention_device(hardware, spec, dtype), dtype, shape.sequence_length)
    again = attention if shape.checkpointing == "selective" and explicit else 0.0
    return named("recomputed_flops_per_token", again, "FLOP", "explicit attention again; checkpointing selective")


def batches_s(shape: TrainingShape, hardware: Hardware) -> float:
    """Seconds of a step for taking its batches."""
    seconds = learned_factor(hardware, "data") * (letter("handing_over", ASSUMED_BATCH_S) * shape.grad_accumulation)
    return named("data_s", seconds, "s", "taking a batch that was made in the background", "assumed")


def startup_s(shape: TrainingShape, hardware: Hardware, is_compiled: bool = False) -> float:
    """Seconds before the first step: importing torch and the engine and, compiled, one block's forward and backward; or reading
    what an earlier run compiled, where ``is_compiled`` and calibration measured that."""
    rates = hardware.training
    measured_s = rates.block_compile_s if shape.method == "full" else rates.adapter_compile_s or rates.block_compile_s
    compile_s = (measured_s or ASSUMED_COMPILE_S) + (rates.compiler_start_s or 0.0)
    if is_compiled and (read_s := rates.compiled_start_s(shape.method)) is not None:
        compile_s = read_s
    compile_s = compile_s if shape.compile else 0.0
    seconds = letter("importing", hardware.process.import_s("train")) + letter("compiling", compile_s)
    seconds = learned_factor(hardware, "train_startup") * seconds
    return named("startup_s", seconds, "s", "importing torch and the engine and, compiled, one block's forward and backward")


def steps_for_budget(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, budget_s: float, layout: Layout = SINGLE
) -> int:
    """Optimizer steps that fit in ``budget_s`` at the predicted step time: ⌊(budget − start-up) / step time⌋, at least 1."""
    if not budget_s > 0:
        raise ConfigError(f"budget_s={budget_s:g} must be above 0.")
    plan = plan_training(spec, shape, hardware, layout)
    return max(1, int((budget_s - plan.startup_s) / plan.step_time_s))
