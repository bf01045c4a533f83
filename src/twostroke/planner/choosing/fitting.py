"""What would make a training run fit: the smallest change that does, found by planning each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes, format_seconds
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.plan import plan_training, training_memory
from twostroke.planner.training.shape import CHECKPOINTING, TrainingShape

MAX_DEVICES = 65_536


@dataclass(frozen=True)
class Change:
    """A change of shape or layout, in words, and what it comes to."""

    words: str
    shape: TrainingShape
    layout: Layout
    memory_bytes: float
    step_time_s: float

    @property
    def sentence(self) -> str:
        return (
            f"The smallest change that makes it fit: {self.words} ({format_bytes(self.memory_bytes)} a device, "
            f"{format_seconds(self.step_time_s)} a step)."
        )


NOTHING_FITS = (
    "No number of devices, sharded so and recomputing everything, makes it fit: shorten the sequence or use adapters."
)


def remedy_for(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout) -> str:
    """What to do about a run that does not fit, in a sentence."""
    change = smallest_change(spec, shape, hardware, layout)
    return change.sentence if change else NOTHING_FITS


def smallest_change(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, layout: Layout) -> Change | None:
    """The first change, in the order of what it asks of the user, after which the run fits ``hardware.memory_bytes``.

    First what changes no result of training: logits in chunks, recomputing, a smaller micro-batch with more passes, then all
    three. Next a higher ZeRO stage over the data-parallel ranks there are, alone and with all three. Last, with all three, a
    doubling of ZeRO-3 ranks, until it fits. None if even ``MAX_DEVICES`` do not help.
    """
    for words, changed, cut in _changes(shape, layout):
        try:
            needed = sum(training_memory(spec, changed, hardware, cut).values())
        except ConfigError:
            continue  # does not divide this model
        if needed <= hardware.memory_bytes:
            return Change(words, changed, cut, needed, plan_training(spec, changed, hardware, cut).step_time_s)
    return None


def _changes(shape: TrainingShape, layout: Layout) -> Iterator[tuple[str, TrainingShape, Layout]]:
    lean, words = shape, []  # with every change that asks nothing but time, and its options
    if shape.logits != "chunked":
        lean, words = replace(shape, logits="chunked"), ["--logits chunked"]
        yield words[0], lean, layout
    for policy in CHECKPOINTING[CHECKPOINTING.index(shape.checkpointing) + 1 :]:
        yield f"--checkpointing {policy}", replace(shape, checkpointing=policy), layout
    smaller, option, batch = shape, "", shape.batch_size
    while batch % 2 == 0:
        batch //= 2
        passes = shape.grad_accumulation * shape.batch_size // batch
        smaller = replace(shape, batch_size=batch, grad_accumulation=passes)
        option = f"--batch-size {batch} --grad-accumulation {passes}"
        yield option, smaller, layout
    if shape.checkpointing != "full":
        lean, words = replace(lean, checkpointing="full"), [*words, "--checkpointing full"]
    if option:
        lean = replace(lean, batch_size=smaller.batch_size, grad_accumulation=smaller.grad_accumulation)
        words.append(option)
    if words:
        yield " ".join(words), lean, layout
    most = 1 if layout.pipeline > 1 else 3
    for zero in range(layout.zero + 1, most + 1) if layout.data > 1 else ():
        yield f"--zero {zero}", shape, replace(layout, zero=zero)
    if words and layout.data > 1:
        for zero in range(layout.zero + 1, most + 1):
            yield " ".join([*words, f"--zero {zero}"]), lean, replace(layout, zero=zero)
    if layout.pipeline > 1:
        return
    data, passes = layout.data, lean.grad_accumulation
    while data * layout.tensor < MAX_DEVICES:
        data *= 2
        if passes % 2 == 0:  # as many tokens a step as before, while there are passes to share out
            passes //= 2
        spread = replace(lean, grad_accumulation=passes)
        kept = [word for word in words if not word.startswith("--batch-size")]
        if (spread.batch_size, passes) != (shape.batch_size, shape.grad_accumulation):
            kept.append(f"--batch-size {spread.batch_size} --grad-accumulation {passes}")
        yield " ".join([*kept, f"--data-parallel {data} --zero 3"]), spread, replace(layout, data=data, zero=3, copies=1)
