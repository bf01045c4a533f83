"""Measures what choosing tokens takes beyond taking the largest logit: draws, filters, penalties, log-probabilities."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from twostroke.calibration.serving_steps import Engines, Prompts, decode_step_s
from twostroke.calibration.timing import Clock
from twostroke.core.rates import SamplingRate
from twostroke.core.sampling_kinds import DRAWN, FILTERED, LOGPROBS, PENALTIES
from twostroke.engine.sampler import sample
from twostroke.planner.hardware.anchors import CONTEXT, HEAD_DIM, SMALLEST, VOCABULARY, anchor_spec
from twostroke.planner.serving.sampling import kind_s
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

PARAMS = {
    DRAWN: SamplingParams(temperature=0.8),
    FILTERED: SamplingParams(temperature=0.8, top_p=0.95),
    PENALTIES: SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
    LOGPROBS: SamplingParams(temperature=0.0, logprobs=5),
}
GREEDY = SamplingParams(temperature=0.0)

FEW, MANY = 4096, 32768
ROWS = 8
PAIRS = 5
SPREAD = 3.0
"""Standard deviation of the logits: a trained model's few likely tokens reach top-p; at 1, thousands of tokens do not."""


@dataclass(frozen=True)
class Three:
    """Seconds of one row of few logits, of ``ROWS`` such rows, and of ``ROWS`` rows of many logits."""

    one: float
    several: float
    wide: float

    def rate(self, kind: str) -> SamplingRate:
        """call + rows·(row + logits·logit) through the three. Noise below nothing is nothing."""
        logit_s = max(0.0, (self.wide - self.several) / (ROWS * (MANY - FEW)))
        row_s = max(0.0, (self.several - self.one) / (ROWS - 1) - FEW * logit_s)
        return SamplingRate(kind, max(0.0, self.one - row_s - FEW * logit_s), row_s, logit_s)


def measure_sampling(clock: Clock) -> Iterator[SamplingRate]:
    """A rate for each kind, the greedy choice of the same rows taken off, and what choosing takes longer within an engine's
    step, whose products have taken the caches: two draws took 74 µs there and 35 by themselves (Zen 3)."""
    rates = []
    for kind, params in PARAMS.items():
        found = [_beyond_greedy_s(clock, params, *size) for size in ((1, FEW), (ROWS, FEW), (ROWS, MANY))]
        rates.append(Three(*found).rate(kind))
    more_call_s, more_row_s = _longer_in_steps(clock, next(rate for rate in rates if rate.kind == DRAWN))
    for rate in rates:
        yield replace(rate, call_s=rate.call_s + more_call_s, row_s=rate.row_s + more_row_s)


def _longer_in_steps(clock: Clock, drawn: SamplingRate) -> tuple[float, float]:
    """(seconds of a call, of each of its rows) by which steps that draw are longer than greedy ones beyond ``drawn``: the
    medians of ``PAIRS``. Other kinds leave the greedy path as draws do."""
    spec, prompts = anchor_spec(*SMALLEST, VOCABULARY, SMALLEST[0] // HEAD_DIM), Prompts()
    more_s = []
    with tempfile.TemporaryDirectory(prefix="twostroke-sampling-") as folder:
        engine = Engines(Path(folder)).get(spec, "bf16")
        for rows in (1, ROWS):
            longer = [
                decode_step_s(clock, engine, prompts, rows, CONTEXT, temperature=0.8)
                - decode_step_s(clock, engine, prompts, rows, CONTEXT)
                for _ in range(PAIRS)
            ]
            more_s.append(max(0.0, statistics.median(longer) - kind_s(drawn, rows, VOCABULARY)))
    row_s = max(0.0, (more_s[1] - more_s[0]) / (ROWS - 1))
    return max(0.0, more_s[0] - row_s), row_s


def _beyond_greedy_s(clock: Clock, params: SamplingParams, n_rows: int, n_logits: int) -> float:
    logits = SPREAD * torch.randn(n_rows, n_logits, generator=torch.Generator().manual_seed(0))
    return max(0.0, clock.best_s(_choosing(logits, params)) - clock.best_s(_choosing(logits, GREEDY)))


@torch.inference_mode()
def _choosing(logits: torch.Tensor, params: SamplingParams) -> Callable[[], object]:
    requests = [Request(f"r{i}", list(range(64)), params) for i in range(len(logits))]
    largest = logits.max(dim=1)
    known, seeds = (largest.values, largest.indices), [0] * len(logits)
    return lambda: sample(logits, requests, seeds, known, torch.get_num_threads())
