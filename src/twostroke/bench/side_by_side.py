"""Measures two models on the inference engine alternately, so that other load on the machine slows both alike."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.core.errors import ConfigError
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one round, by the engine's counters: of steps that only prefill, and of steps that only decode."""

    prefill_tok_per_s: float
    decode_tok_per_s: float


@dataclass(frozen=True)
class SpeedPoint:
    """One batch size: the medians of both models, and median and range of the ratio b / a of each round."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    a: Rates
    b: Rates
    prefill_ratio: float
    decode_ratio: float
    prefill_ratio_range: tuple[float, float]
    decode_ratio_range: tuple[float, float]


def measure_alternating(
    models: Sequence[LLM],
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> SpeedPoint:
    """Measure both of ``models`` in ``rounds`` rounds, after one that does not count. They alternate in going first.

    Prompts are random tokens of the same lengths for both models. They are new in every round and for every batch size, so that
    the prefix cache finds nothing.
    """
    if output_tokens < 2 or prompt_tokens < 1 or rounds < 1 or batch < 1:
        raise ConfigError(
            f"batch={batch}, prompt_tokens={prompt_tokens} and rounds={rounds} must be at least 1, and "
            f"output_tokens={output_tokens} at least 2."
        )
    rates: tuple[list[Rates], list[Rates]] = ([], [])
    for round_ in range(-1, rounds):
        for i in (0, 1) if round_ % 2 == 0 else (1, 0):
            found = _once(models[i], batch, prompt_tokens, output_tokens, f"{batch} {round_}")
            if round_ >= 0:
                rates[i].append(found)
        if round_ >= 0:
            progress()
    a, b = (
        Rates(statistics.median(r.prefill_tok_per_s for r in own), statistics.median(r.decode_tok_per_s for r in own))
        for own in rates
    )
    prefill = [y.prefill_tok_per_s / x.prefill_tok_per_s for x, y in zip(*rates, strict=True)]
    decode = [y.decode_tok_per_s / x.decode_tok_per_s for x, y in zip(*rates, strict=True)]
    return SpeedPoint(
        batch,
        prompt_tokens,
        output_tokens,
        a,
        b,
        statistics.median(prefill),
        statistics.median(decode),
        (min(prefill), max(prefill)),
        (min(decode), max(decode)),
    )


def _once(llm: LLM, batch: int, prompt_tokens: int, output_tokens: int, seed: str) -> Rates:
    rng = random.Random(seed)
    n_vocabulary = llm.engine.spec.vocab_size
    prompts = [[rng.randrange(n_vocabulary) for _ in range(prompt_tokens)] for _ in range(batch)]
    before = llm.stats()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True))
    after = llm.stats()
    return Rates(
        (after.prefill_tokens - before.prefill_tokens) / (after.prefill_s - before.prefill_s),
        (after.decode_tokens - before.decode_tokens) / (after.decode_s - before.decode_s),
    )
