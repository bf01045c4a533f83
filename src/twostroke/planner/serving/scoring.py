"""Seconds of scoring text on the inference engine: every token through the model, and its logits."""

from __future__ import annotations

from dataclasses import replace

from twostroke.core.named import named
from twostroke.core.policy import scored_rows
from twostroke.core.rates import Phase
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.native import Native, Use, chunks
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.torch_runner import TorchRunner
from twostroke.planner.work.component import total_seconds

LOGIT_BYTES = 4.0
"""What a logit in fp32 moves while the native library scores it: it is read once, and the head has found the largest."""
TORCH_LOGIT_BYTES = 16.0
"""By torch: read and written by the logarithm of the softmax, read to look its token up, and read to find the largest."""


class Scoring(Native):
    """A prompt of which every token goes through the head, as ``engine.scoring`` computes it."""

    def uses(self, phase: Phase) -> list[Use]:
        return [use for _, count in chunks(self.shape) for use in self._uses_of_step(count, count)]


def engine_token_s(spec: ModelSpec, shape: ServingShape, hardware: Hardware, tokens: int) -> float:
    """Seconds of a token of a sequence of ``tokens``, in steps of the token budget, as far as the logits at once allow."""
    rows = scored_rows(spec.vocab_size)
    length = max(rows, tokens)
    strategy = Scoring if hardware.runs_natively else TorchRunner
    engine = strategy(spec, replace(shape, batch=1, prompt_tokens=length, output_tokens=1), hardware)
    logit_bytes = LOGIT_BYTES if hardware.runs_natively else TORCH_LOGIT_BYTES
    logits_s = logit_bytes * length * spec.vocab_size / hardware.bandwidth(4.0 * rows * spec.vocab_size)
    return named("scored_token_s", (total_seconds(engine.prefill()) + logits_s) / length, "s", "a prompt and all its logits")
