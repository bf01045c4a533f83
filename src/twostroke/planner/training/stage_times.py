"""A training step's passes on the slowest stage: from the rates of parts, and held to whole measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from twostroke.core.named import within
from twostroke.core.rates import TrainingStep
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.anchors import TrainingAnchor, layer_and_around, ratio_at, training_anchors
from twostroke.planner.hardware.corrections import learned_factor
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.present import training_slowdown
from twostroke.planner.training.datasheet_rates import LOW_PRECISIONS
from twostroke.planner.training.layout import SINGLE, Layout
from twostroke.planner.training.offload import update_s
from twostroke.planner.training.passes import (
    is_rounded,
    layer_works,
    loss_work,
    optimizer_work,
    recomputed_works,
    setup_work,
)
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import (
    Stage,
    anchor_shape,
    rank_layers,
    rank_shape,
    recomputation_of,
    stage_held,
    stages_of,
)
from twostroke.planner.work.component import Work, merge, total_seconds
from twostroke.planner.work.params import count_parameters


def rate_dtype(shape: TrainingShape, hardware: Hardware) -> str:
    """The type whose rates apply: fp16 runs at bf16's on every device that lists only that one."""
    if shape.dtype in LOW_PRECISIONS:
        return shape.dtype
    if shape.dtype == "fp16" and "fp16" not in hardware.peak_flop_per_s:
        return "bf16"
    return shape.compute_dtype


@dataclass(frozen=True)
class StageTime:
    """The slowest stage's passes over one micro-batch, and the seconds of a stage without embedding and head."""

    stage: Stage
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    ordinary_s: float


@dataclass(frozen=True)
class AnchorRatios:
    """Measured ÷ planned of what calibration measured of whole steps (``training.anchors``): of a layer and of what is around
    the layers, by direction ("forward", "backward"). 1 where nothing was measured."""

    layer: Mapping[str, float] = field(default_factory=lambda: {"forward": 1.0, "backward": 1.0})
    around: Mapping[str, float] = field(default_factory=lambda: {"forward": 1.0, "backward": 1.0})


AS_PLANNED = AnchorRatios()
DIRECTIONS = ("forward", "backward")


def anchor_ratios(spec: ModelSpec, shape: TrainingShape, hardware: Hardware) -> AnchorRatios:
    """The ratios at ``spec``'s width. Compiled fp32 is taken to gain and lose what compiled bf16 does."""
    found = _measured_ratios(TrainingShape(dtype=shape.dtype, compile=shape.compile), hardware)
    if not found:
        return AS_PLANNED

    def at_width(part: Callable[[AnchorRatios], float]) -> float:
        return ratio_at({(width, 1): part(ratios) for width, ratios in found.items()}, spec.d_model, 1)

    return AnchorRatios(
        {direction: at_width(lambda r, d=direction: r.layer[d]) for direction in DIRECTIONS},  # type: ignore[misc]
        {direction: at_width(lambda r, d=direction: r.around[d]) for direction in DIRECTIONS},  # type: ignore[misc]
    )


def _measured_steps(like: TrainingShape, hardware: Hardware) -> Iterator[tuple[TrainingAnchor, TrainingStep, TrainingStep]]:
    """(anchor, its shallow step, its deep step) of those that were measured, in the type and mode of ``like``, else in bf16."""
    for anchor in training_anchors(like.mode, hardware.kind):
        for dtype in (rate_dtype(like, hardware), "bf16"):
            shallow, deep = (hardware.training.step(anchor.width, n, dtype, like.mode) for n in (anchor.shallow, anchor.deep))
            if shallow is not None and deep is not None:
                yield anchor, shallow, deep
                break


@lru_cache(maxsize=64)
def _measured_ratios(like: TrainingShape, hardware: Hardware) -> dict[int, AnchorRatios]:
    """Width → ratios of its anchor, for the type and mode of ``like``: every plan of a machine asks for the same few."""
    found: dict[int, AnchorRatios] = {}
    for anchor, shallow_step, deep_step in _measured_steps(like, hardware):
        planned = passes_of(anchor.spec(anchor.deep), anchor_shape(anchor, deep_step.dtype, like), hardware, SINGLE)
        layer, around = {}, {}
        for direction in DIRECTIONS:
            shallow_s, deep_s = shallow_step.direction_s(direction), deep_step.direction_s(direction)
            layer_s, around_s = layer_and_around(anchor, shallow_s, deep_s)
            layer[direction] = layer_s / planned.layer_s(direction)
            around[direction] = around_s / planned.around_s(direction)
        found[anchor.width] = AnchorRatios(layer, around)
    return found


@lru_cache(maxsize=64)
def _update_ratios(like: TrainingShape, hardware: Hardware) -> dict[tuple[int, int], float]:
    """(parameters, 1) → measured ÷ planned of the update of that many: how much of what it moves stays in the caches depends on
    them and not on the width. The two depths of each anchor are two points."""
    found: dict[tuple[int, int], float] = {}
    for anchor, *steps in _measured_steps(like, hardware):
        for step in steps:
            spec = anchor.spec(step.n_layers)
            planned = optimizer_work(spec, anchor_shape(anchor, step.dtype, like), hardware).seconds
            found[count_parameters(spec).total, 1] = step.optimizer_s / planned
    return found


def update_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout) -> Work:
    """The optimizer's update, held to the anchors. What Muon adds to one, and what rounds to bf16, was not part of them."""
    work = optimizer_work(spec, shape, hardware, layout).stretched(learned_factor(hardware, "update"))
    work = work.stretched(layout.sharing * _slowdown(shape, hardware))
    part = stage_held(spec, shape, layout, stages_of(spec, shape, layout)[-1])
    updated = part.trained_of(layout.shared_by(1))
    if shape.offload_optimizer == "cpu":
        return replace(work, seconds=update_s(shape, updated))
    if shape.optimizer == "muon" or is_rounded(shape, hardware):
        return work
    return work.stretched(update_ratio(updated, shape, hardware))


def update_ratio(n_updated: float, shape: TrainingShape, hardware: Hardware) -> float:
    """Measured ÷ planned of the update of ``n_updated`` parameters, from calibration's whole steps; 1 without any."""
    return ratio_at(_update_ratios(TrainingShape(dtype=shape.dtype, compile=shape.compile), hardware), n_updated, 1)


def contended_ratios(shape: TrainingShape, hardware: Hardware) -> AnchorRatios:
    """The same because of what else runs on the machine now."""
    return alike(_slowdown(shape, hardware))


def alike(ratio: float) -> AnchorRatios:
    """``ratio`` on both passes."""
    each = dict.fromkeys(DIRECTIONS, ratio)
    return AS_PLANNED if ratio == 1.0 else AnchorRatios(each, each)


def _slowdown(shape: TrainingShape, hardware: Hardware) -> float:
    kind = shape.mode if shape.method == "full" or shape.mode == "eager" else "adapters"
    return training_slowdown(hardware, kind)


def learned_ratios(hardware: Hardware) -> AnchorRatios:
    """Factors on the passes that the machine's own runs taught."""
    factors = {direction: learned_factor(hardware, direction) for direction in DIRECTIONS}
    return AnchorRatios(factors, factors) if hardware.corrections.learned else AS_PLANNED


@dataclass(frozen=True)
class Passes:
    """Works of forward and backward: of each kind of layer with how many there are, of the loss, and of what comes before the
    first layer."""

    layers: Mapping[str, tuple[tuple[tuple[Work, ...], float], ...]]
    loss: Mapping[str, tuple[Work, ...]]
    setup: Mapping[str, tuple[Work, ...]]
    n_layers: int

    def layers_s(self, direction: str) -> list[float]:
        """Seconds of a layer of each kind."""
        return [total_seconds(works) for works, _ in self.layers[direction]]

    def layer_s(self, direction: str) -> float:
        """Seconds of an average layer."""
        return sum(count * total_seconds(works) for works, count in self.layers[direction]) / self.n_layers

    def around_s(self, direction: str) -> float:
        return total_seconds(self.loss[direction]) + total_seconds(self.setup[direction])

    def held_to(self, ratios: AnchorRatios) -> Passes:
        """The same with every time multiplied by its ratio."""
        if ratios is AS_PLANNED:
            return self

        def each(works: Iterable[Work], ratio: float) -> tuple[Work, ...]:
            return tuple(work.stretched(ratio) for work in works)

        return Passes(
            {d: tuple((each(works, ratios.layer[d]), n) for works, n in found) for d, found in self.layers.items()},
            {d: each(works, ratios.around[d]) for d, works in self.loss.items()},
            {d: each(works, ratios.around[d]) for d, works in self.setup.items()},
            self.n_layers,
        )


def passes_of(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout) -> Passes:
    """From the rates of parts: each kind of layer is timed once."""
    layers: dict[str, tuple[tuple[tuple[Work, ...], float], ...]] = {}
    loss: dict[str, tuple[Work, ...]] = {}
    setup: dict[str, tuple[Work, ...]] = {}
    for direction in DIRECTIONS:
        found, backward = [], direction == "backward"
        with within(direction):
            for layer in rank_layers(spec, layout.tensor, layout.expert, shape.targets):
                works = layer_works(spec, shape, hardware, layer, layout, backward)
                if backward:
                    works += recomputed_works(spec, shape, hardware, layer, layout, recomputation_of(shape, layout))
                found.append((tuple(works), layer.count))
            loss[direction] = tuple(loss_work(spec, shape, hardware, layout.tensor, backward))
            setup[direction] = tuple(setup_work(spec, shape, hardware, backward))
        layers[direction] = tuple(found)
    return Passes(layers, loss, setup, spec.n_layers)


def stage_time(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout) -> StageTime:
    """The passes, held to the anchors, and put on the stages as often as each has its layers."""
    shape = rank_shape(replace(shape, dtype=rate_dtype(shape, hardware)), layout)
    passes = passes_of(spec, shape, hardware, layout).held_to(anchor_ratios(spec, shape, hardware))
    passes = passes.held_to(learned_ratios(hardware)).held_to(contended_ratios(shape, hardware))
    passes = passes.held_to(alike(layout.sharing))  # a rank has that part of the cores and of the bandwidth
    whole = stages_of(spec, shape, layout)
    layer_s = [sum(seconds) for seconds in zip(passes.layers_s("forward"), passes.layers_s("backward"), strict=True)]
    loss_s = sum(total_seconds(works) for works in passes.loss.values())
    setup_s = sum(total_seconds(works) for works in passes.setup.values())

    def layers_s(stage: Stage) -> float:
        return sum(n * each_s for n, each_s in zip(stage.counts(spec), layer_s, strict=True))

    def seconds(stage: Stage) -> float:
        return layers_s(stage) + stage.last * loss_s + stage.first * setup_s

    slowest = max(whole, key=seconds)
    here = slowest.counts(spec)
    forward, backward = (
        merge(
            [
                *(work.times(n) for n, (works, _) in zip(here, passes.layers[direction], strict=True) for work in works),
                *(passes.loss[direction] if slowest.last else ()),
                *(passes.setup[direction] if slowest.first else ()),
            ]
        )
        for direction in DIRECTIONS
    )
    return StageTime(slowest, forward, backward, max(map(layers_s, whole)))
