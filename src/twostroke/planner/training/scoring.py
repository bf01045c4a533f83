"""Seconds of scoring text on the decoder: training's forward pass, eager and without gradients."""

from __future__ import annotations

from twostroke.core.named import named
from twostroke.core.policy import SCORED_TOKENS_PER_PASS, streamed_tokens
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.layout import SINGLE
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.stage_times import stage_time
from twostroke.planner.work.component import total_seconds
from twostroke.planner.work.params import count_parameters


def decoder_token_s(spec: ModelSpec, dtype: str, hardware: Hardware, context: int) -> float:
    """Seconds of a token in windows of ``context``, so many at once as ``SCORED_TOKENS_PER_PASS`` hold. The loss is training's,
    whose gradient of the logits is a small part of it."""
    rows = max(1, SCORED_TOKENS_PER_PASS // context)
    shape = TrainingShape(batch_size=rows, sequence_length=context, dtype=dtype, compile=False)
    seconds = total_seconds(stage_time(spec, shape, hardware, SINGLE).forward) / (rows * context)
    return named("scored_token_s", seconds, "s", "an eager forward pass")


def reading_token_s(spec: ModelSpec, hardware: Hardware, n_tokens: float) -> float:
    """Seconds that reading a model layer by layer, at 16 bits a weight, adds to each of ``n_tokens``: as many as go through it
    together share one reading."""
    rate = hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s
    seconds = 2.0 * count_parameters(spec).total / rate / min(n_tokens, streamed_tokens(spec.d_model))
    return named("read_token_s", seconds, "s", "the model is read once for many tokens")
