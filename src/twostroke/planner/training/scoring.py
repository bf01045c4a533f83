"""Seconds of scoring text on the decoder: training's forward pass, eager and without gradients."""

from __future__ import annotations

from twostroke.core.named import named
from twostroke.core.policy import SCORED_TOKENS_PER_PASS
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.layout import SINGLE
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.stage_times import stage_time
from twostroke.planner.work.component import total_seconds


def decoder_token_s(spec: ModelSpec, dtype: str, hardware: Hardware, context: int) -> float:
    """Seconds of a token in windows of ``context``, so many at once as ``SCORED_TOKENS_PER_PASS`` hold. The loss is training's,
    whose gradient of the logits is a small part of it."""
    rows = max(1, SCORED_TOKENS_PER_PASS // context)
    shape = TrainingShape(batch_size=rows, sequence_length=context, dtype=dtype, compile=False)
    seconds = total_seconds(stage_time(spec, shape, hardware, SINGLE).forward) / (rows * context)
    return named("scored_token_s", seconds, "s", "an eager forward pass")
