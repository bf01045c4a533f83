"""Whole training steps of the anchors: times by part, what compiling takes, and for the first of them the peak of memory.

The first one runs before anything else does, in a process whose compiler and allocator were never used: that is what a real
run pays, and a peak is of a whole process.
"""

from __future__ import annotations

import statistics
import time

import torch

from twostroke.calibration.timing import Clock, Window
from twostroke.core.recipe import TrainSettings
from twostroke.data.loader import Batch
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.planner.anchors import TRAINING_PARTS, TrainingAnchor
from twostroke.training.clock import StepClock
from twostroke.training.memory import memory_bytes, peak_memory_bytes, reset_peak
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.step import TrainStep

LEAST_STEPS = 5
MOST_STEPS = 40
WARM_UP_STEPS = 2
SECONDS = 1.5
"""Steps are repeated for so long after the warm-up, and at most thrice as long until ``LEAST_STEPS`` were undisturbed."""


def _batch(anchor: TrainingAnchor, device: torch.device) -> Batch:
    rows, length = anchor.batch_size, anchor.sequence_length
    tokens = torch.randint(0, anchor.spec.vocab_size, (rows, length), device=device)
    positions = torch.arange(length, device=device)[None].expand(rows, length).contiguous()
    documents = torch.zeros(rows, length, dtype=torch.int32, device=device)
    return Batch(tokens=tokens, targets=tokens.roll(-1, 1), positions=positions, documents=documents, n_valid=tokens.numel())


def measure_steps(clock: Clock, anchor: TrainingAnchor, dtype: str, mode: str) -> dict[str, float]:
    """Medians over undisturbed steps of ``TRAINING_PARTS``, ``first_step_s``, ``peak_bytes`` of a step, and ``rest_bytes``:
    what the process held before it had the model, all under the anchor's names. Nothing where compiling does not work.

    Medians, not minima: a run's own steps are scored by their median, and a step's best is one that ran out of luck's cache.
    """
    device, effort = clock.device, clock.effort
    place = torch.device(device)
    rest = memory_bytes(place)
    settings = TrainSettings(batch_size=anchor.batch_size, sequence_length=anchor.sequence_length, dtype=dtype)  # type: ignore[arg-type]
    decoder = Decoder(anchor.spec, device=device)
    initialise(decoder, 0)
    decoder.train()
    masters = MasterWeights(decoder, torch.bfloat16 if dtype == "bf16" else torch.float32)
    step = TrainStep(
        decoder, masters, Optimizers(masters, anchor.spec, settings), settings.clip_norm, mode == "compiled", lambda line: None
    )
    laps, batch = StepClock(place), _batch(anchor, place)
    begin = time.perf_counter()
    laps.start()
    step([batch], 1.0, laps)
    first_s, _ = laps.finish()
    if mode == "compiled" and not step.is_compiled:
        return {}
    found: dict[str, list[dict[str, float]]] = {"clean": [], "disturbed": []}
    peak = 0
    for n in range(MOST_STEPS):
        if n == WARM_UP_STEPS:
            begin = time.perf_counter()
        reset_peak(place)
        window = Window()
        laps.start()
        step([batch], 1.0, laps)
        _, parts = laps.finish()
        peak = max(peak, peak_memory_bytes(place))
        if n >= WARM_UP_STEPS:
            found["disturbed" if window.disturbed else "clean"].append(parts)
            elapsed = time.perf_counter() - begin
            enough = len(found["clean"]) >= LEAST_STEPS and elapsed >= SECONDS * effort
            if enough or elapsed >= 3 * SECONDS * effort:
                break
    steady = found["clean"] or found["disturbed"]
    values = {part: statistics.median(parts[part.removesuffix("_s")] for parts in steady) for part in TRAINING_PARTS}
    clock.n_measured += 1
    clock.n_disturbed += not found["clean"]
    values |= {"first_step_s": first_s, "peak_bytes": float(peak), "rest_bytes": float(rest)}
    return {anchor.name(dtype, mode, part): value for part, value in values.items()}
