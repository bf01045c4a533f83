"""Measures whole training steps of the anchors: the time of each part, and the peak of memory.

Times are measured in the calibrating process, one anchor after the other, because a compiler that has warmed up compiles the
next graph in a third of the time. The peak is that of a whole process, so it is measured in a new one, as in a real run.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from twostroke.calibration.timing import DISTURBED_SHARE, Clock, Window
from twostroke.calibration.transformer import empty_compile_cache, mixed_type, start_compiler
from twostroke.core.heap import settle_memory
from twostroke.core.matrices import ALL_LINEAR
from twostroke.core.rates import Mode, TrainingStep
from twostroke.core.train_settings import TrainSettings
from twostroke.data.loader import Batch
from twostroke.model.adapters import AdapterSettings, attach_adapters
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.planner.hardware.anchors import (
    ADAPTER_ANCHOR,
    ADAPTER_DROPOUT,
    ADAPTER_RANK,
    VOCABULARY,
    TrainingAnchor,
    training_anchors,
)
from twostroke.training.clock import StepClock
from twostroke.training.memory import peak_memory_bytes, reset_peak
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.step import TrainStep

LEAST_STEPS = 3
MOST_STEPS = 40
WARM_UP_STEPS = 1
SECONDS = 0.8
"""Steps repeat for so long after the warm-up, and up to ``PATIENCE`` times as long until ``LEAST_STEPS`` were undisturbed."""

PARTS = ("forward", "backward", "optimizer")

PEAK_STEPS: dict[Mode, int] = {"compiled": 12, "eager": 25}
"""Steps up to the peak. That of compiled ones grew by up to 4 MB from the fifth to the twelfth. Eager ones free pieces of many
sizes in another order each time: the peak of one step grew from 602 MB after five steps to 709 after twenty, and no further."""
PEAK_PROCESSES: dict[Mode, int] = {"compiled": 1, "eager": 3}
"""New processes whose median peak is taken. Peaks of four eager processes were 603, 630, 643 and 646 MB, because their heaps
were cut differently; those of compiled ones were the same to 1 MB in five calibrations."""
PEAK_TIMEOUT_S = 120


def _batch(anchor: TrainingAnchor, device: torch.device) -> Batch:
    rows, length = anchor.batch_size, anchor.sequence_length
    tokens = torch.randint(0, VOCABULARY, (rows, length), device=device)
    positions = torch.arange(length, device=device)[None].expand(rows, length).contiguous()
    documents = torch.zeros(rows, length, dtype=torch.int32, device=device)
    return Batch(tokens=tokens, targets=tokens.roll(-1, 1), positions=positions, documents=documents, n_valid=tokens.numel())


def _training_step(
    anchor: TrainingAnchor, n_layers: int, dtype: str, mode: str, device: torch.device, method: str = "full"
) -> TrainStep:
    settings, spec = TrainSettings(batch_size=anchor.batch_size, sequence_length=anchor.sequence_length), anchor.spec(n_layers)
    decoder = Decoder(spec, device=str(device))
    initialise(decoder, 0)
    if method != "full":
        settings_of_adapters = AdapterSettings(ADAPTER_RANK, 2.0 * ADAPTER_RANK, (ALL_LINEAR,), ADAPTER_DROPOUT)
        attach_adapters(decoder, spec, settings_of_adapters, seed=0)
    decoder.train()
    masters = MasterWeights(decoder, torch.bfloat16 if dtype == "bf16" else torch.float32)
    optimizers = Optimizers(masters, spec, settings)
    return TrainStep(decoder, masters, optimizers, settings.clip_norm, mode == "compiled", lambda line: None)


class Kind(NamedTuple):
    """An anchor, and how its steps are computed."""

    anchor: TrainingAnchor
    dtype: str
    mode: Mode
    method: str = "full"

    def __str__(self) -> str:
        adapters = " with adapters" if self.method != "full" else ""
        return f"{self.mode} steps of width {self.anchor.width} in {self.dtype}{adapters}"


def kinds_on(device: str) -> tuple[list[Kind], list[Kind]]:
    """(compiled, eager) kinds that are measured on "cpu" or "cuda"."""
    kind = "gpu" if device == "cuda" else "cpu"
    mixed = mixed_type(device)
    compiled = [Kind(anchor, mixed, "compiled") for anchor in training_anchors("compiled", kind)]
    types = dict.fromkeys((mixed, "fp32"))
    eager = [Kind(anchor, dtype, "eager") for anchor in training_anchors("eager", kind) for dtype in types]
    return [*compiled, Kind(ADAPTER_ANCHOR, mixed, "compiled", "lora")], eager


def means(moments: Iterable[Iterable[TrainingStep]]) -> list[TrainingStep]:
    """Each step of the first moment with the mean times of all: a machine is faster or slower for minutes, and one moment's
    eager layer took 13 ms where another's took 28."""
    found: dict[tuple[object, ...], list[TrainingStep]] = {}
    for step in itertools.chain(*moments):
        found.setdefault((step.width, step.n_layers, step.dtype, step.mode, step.method), []).append(step)
    return [_mean(steps) for steps in found.values()]


def _mean(steps: Sequence[TrainingStep]) -> TrainingStep:
    """The first of ``steps`` with the mean times of all."""
    times = {f"{name}_s": statistics.mean(getattr(step, f"{name}_s") for step in steps) for name in PARTS}
    return replace(steps[0], **times)


class Repeated:
    """A training step of ``kind`` with ``n_layers``, computed as often as asked for. ``first_s`` is its first time.
    ``is_usable`` says that it was compiled where that was asked for."""

    def __init__(self, kind: Kind, n_layers: int, device: str) -> None:
        anchor, dtype, mode, method = kind
        place = torch.device(device)
        self._step = _training_step(anchor, n_layers, dtype, mode, place, method)
        self._laps, self._batch = StepClock(place), _batch(anchor, place)
        self.first_s = self.once()["whole"]
        settle_memory()  # as a run does
        self.is_usable = mode != "compiled" or self._step.is_compiled

    def once(self) -> dict[str, float]:
        """Seconds of each part of one more."""
        self._laps.start()
        self._step([self._batch], 1.0, self._laps)
        seconds, parts = self._laps.finish()
        return parts | {"whole": seconds}


class AnchorSteps:
    """Steps of the anchors on the device of ``clock``, kept from one moment to the next: building and compiling them again took
    three quarters of a moment."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[tuple[Kind, int], Repeated] = {}

    def get(self, kind: Kind, n_layers: int) -> Repeated | None:
        """None if compiling does not work."""
        if (kind, n_layers) not in self._kept:
            self._kept[kind, n_layers] = Repeated(kind, n_layers, self._clock.device)
        found = self._kept[kind, n_layers]
        return found if found.is_usable else None

    def measure(self, kind: Kind) -> list[TrainingStep]:
        """Both depths, the shallow one first; nothing if compiling does not work. The second depth compiles nothing, because
        all layers share one graph."""
        found = []
        for n_layers in (kind.anchor.shallow, kind.anchor.deep):
            step = self.get(kind, n_layers)
            if step is None:
                return []
            found.append(_measured(self._clock, kind, n_layers, step))
        return found


def _measured(clock: Clock, kind: Kind, n_layers: int, step: Repeated) -> TrainingStep:
    """The median of each part over undisturbed steps, and the first step.

    It takes medians, because a run's own steps are scored by their median, and the shortest step is a lucky one.
    """
    clean: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    shares: list[float] = []
    begin = time.perf_counter()
    for n in range(MOST_STEPS):
        if n == WARM_UP_STEPS:
            begin = time.perf_counter()
        window = Window()
        parts = step.once()
        if n >= WARM_UP_STEPS:
            shares.append(window.waited_share)
            (disturbed if shares[-1] > DISTURBED_SHARE else clean).append(parts)
            elapsed = time.perf_counter() - begin
            if clock.is_over(elapsed, SECONDS * clock.effort, len(clean) >= LEAST_STEPS):
                break
    clock.count(shares)
    steady = clean or disturbed
    forward, backward, optimizer = (statistics.median(p[part] for p in steady) for part in PARTS)
    return TrainingStep(
        kind.anchor.width, n_layers, kind.dtype, kind.mode, forward, backward, optimizer, step.first_s, method=kind.method
    )


def in_a_new_process(steps: Sequence[TrainingStep], kind: Kind, device: str) -> tuple[list[TrainingStep], float | None]:
    """(``steps``, what the first step of a new process takes beyond the first of this one). The shallow step of ``kind`` gets
    its peak, and an eager deep one too; a compiled one what a start takes whose graphs lie in the compiler's cache. Peaks are
    measured in new processes with an empty one, as a first run has it: a compiler that has compiled leaves memory behind. As
    they were, and None, if that fails or takes too long."""
    asked = (kind.anchor.width, kind.dtype, kind.mode, kind.method)
    mine = [step for step in steps if (step.width, step.dtype, step.mode, step.method) == asked]
    found: dict[int, dict[str, Any]] = {}
    longer_s: float | None = None
    try:
        for step in mine if kind.mode == "eager" else mine[:1]:
            runs = [_new_process(step, kind.anchor, device) for _ in range(PEAK_PROCESSES[kind.mode])]
            first_s, peak_bytes, start_s = (statistics.median(values) for values in zip(*runs, strict=True))
            found[step.n_layers] = {"peak_bytes": peak_bytes}
            if kind.mode == "compiled":
                found[step.n_layers]["compiled_start_s"] = start_s
            longer_s = max(0.0, first_s - step.first_step_s) if longer_s is None else longer_s
    except (OSError, ValueError, subprocess.SubprocessError):
        return [*steps], None
    return [replace(step, **found.get(step.n_layers, {})) if step in mine else step for step in steps], longer_s


def _new_process(step: TrainingStep, anchor: TrainingAnchor, device: str) -> tuple[float, float, float]:
    """(seconds of the first step, bytes of the peak) of a process of its own; and what the start of a second one takes, which
    finds what the first has compiled (0 of eager steps). Raises OSError, ValueError or SubprocessError."""
    shape = map(str, (anchor.width, step.n_layers, anchor.deep, anchor.batch_size, anchor.sequence_length))
    how = (step.dtype, step.mode, step.method, device, str(torch.get_num_threads()))
    command = [sys.executable, "-m", __name__, *shape, *how]

    def run() -> list[float]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEAK_TIMEOUT_S, check=True)
        return [float(word) for word in done.stdout.split()[-3:]]

    with empty_compile_cache():
        first_s, peak_bytes, _ = run()
        start_s = run()[2] if step.mode == "compiled" else 0.0
    return first_s, peak_bytes, start_s


def _main(arguments: list[str]) -> None:
    importlib.import_module("twostroke.training.loop")  # a run holds what it imports: 8 to 13 MB beyond this module's
    *shape, dtype, mode, method, device, n_threads = arguments
    torch.set_num_threads(int(n_threads))
    anchor, place = TrainingAnchor(*map(int, shape)), torch.device(device)
    laps, batch = StepClock(place), _batch(anchor, place)
    importing_s = starting_s = 0.0
    if mode == "compiled":
        begin = time.perf_counter()
        importlib.import_module("torch._inductor.compile_fx")
        importing_s = time.perf_counter() - begin
        start_compiler(device)  # what it does once on a machine is no run's first step
        starting_s = time.perf_counter() - begin
    step = _training_step(anchor, anchor.shallow, dtype, mode, place, method)
    first_s = 0.0
    for n in range(PEAK_STEPS["compiled" if mode == "compiled" else "eager"]):
        if n == 1:  # as a run does. The memory that compiling took for the moment is not a step's
            settle_memory()
            reset_peak(place)
        laps.start()
        begin = time.perf_counter()
        step([batch], 1.0, laps)
        first_s = first_s or time.perf_counter() - begin
    print(importing_s + first_s, peak_memory_bytes(place), starting_s + first_s)


if __name__ == "__main__":
    _main(sys.argv[1:])
