"""Measures prefill and decode throughput of the engine alone, without server and arrival process, in whole batches."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from twostroke.core.checks import check_whole
from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.policy import MAX_RUNNING
from twostroke.core.units import format_count, format_seconds
from twostroke.engine.achieved import Achieved, achieved
from twostroke.scheduling.sampling_params import SamplingParams

FORMULAS: dict[str, str] = {
    "prefill_s": "wall time of one token for each of the batch's prompts, median of the repeats",
    "prefill_tok_per_s": "batch · prompt tokens / prefill_s",
    "decode_s": "wall time of output tokens for each prompt − prefill_s, medians of the repeats",
    "decode_tok_per_s": "batch · (output tokens − 1) / decode_s",
    "output_tok_per_s": "batch · output tokens / (prefill_s + decode_s)",
    "tpot_s": "decode_s / (output tokens − 1): one decode step of the batch",
    "…_bytes_per_s": "packed weights and KV cache that the engine's prefill or decode steps had to read / their time",
    "…_flop_per_s": "multiply-adds of products and attention in them · 2 / their time",
    "…_read_share": "bytes/s / the measured read rate of all threads at what one step reads: the share of the bandwidth limit",
    "…_flop_share": "FLOP/s / the best measured product rate in the weights' format",
}


MOST_REPEATS = 1000
"""A thousand repeats tell a median to 4% of their spread. More is a slip of the keyboard that runs for days."""


class Generator(Protocol):
    """The part of ``twostroke.engine.llm.LLM`` that this module uses."""

    engine: Any

    def generate(self, prompts: Any, params: Any, lora: Any = None) -> Any: ...

    def stats(self) -> Any: ...


@dataclass(frozen=True)
class OfflineSpec:
    """Each batch size is measured ``repeats`` times with new random prompts, so that the prefix cache finds nothing.
    ``max_running``: most requests of a step of the engine."""

    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 128
    output_tokens: int = 64
    repeats: int = 3
    seed: int = 0
    max_running: int = MAX_RUNNING

    def __post_init__(self) -> None:
        check_whole("prompt_tokens", self.prompt_tokens)
        check_whole("output_tokens", self.output_tokens, least=2)
        check_whole("repeats", self.repeats, most=MOST_REPEATS)
        if not self.batches or min(self.batches) < 1 or max(self.batches) > self.max_running:
            raise ConfigError(
                f"batches={self.batches} must be batch sizes from 1 to {self.max_running}, the most that one step holds. "
                "Raise max_running for more."
            )


@dataclass(frozen=True)
class OfflinePoint:
    """The numbers of one batch size, as ``FORMULAS`` defines them."""

    batch: int
    prefill_s: float
    prefill_tok_per_s: float
    decode_s: float
    decode_tok_per_s: float
    output_tok_per_s: float
    tpot_s: float
    achieved: Achieved

    def values(self) -> dict[str, float]:
        """By the ledger's names, with what was achieved."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "achieved"}
        return own | self.achieved.values()


def run_offline(
    model: Path,
    llm: Generator,
    spec: OfflineSpec,
    batch: int,
    progress: Callable[[], None] = lambda: None,
    adapters: Sequence[str] = (),
) -> OfflinePoint:
    """Measure one batch size after a warm-up that does not count. ``progress`` is called after each repeat. Prompts have the
    ``adapters`` in turn, if there are any."""
    model_spec = read_spec(model)
    rng = random.Random(spec.seed)

    def timed(n_output: int) -> float:
        prompts = [[rng.randrange(model_spec.vocab_size) for _ in range(spec.prompt_tokens)] for _ in range(batch)]
        params = SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, [adapters[i % len(adapters)] for i in range(batch)] if adapters else None)
        return time.perf_counter() - start

    timed(2)
    prefill, whole = [], []
    before = llm.stats()
    for _ in range(spec.repeats):
        prefill.append(timed(1))
        whole.append(timed(spec.output_tokens))
        progress()
    prefill_s = statistics.median(prefill)
    # If decode is shorter than the noise of prefill, the difference may be zero or negative. One microsecond keeps rates
    # finite.
    decode_s = max(statistics.median(whole) - prefill_s, 1e-6)
    n_decoded = spec.output_tokens - 1
    return OfflinePoint(
        batch=batch,
        prefill_s=prefill_s,
        prefill_tok_per_s=batch * spec.prompt_tokens / prefill_s,
        decode_s=decode_s,
        decode_tok_per_s=batch * n_decoded / decode_s,
        output_tok_per_s=batch * spec.output_tokens / (prefill_s + decode_s),
        tpot_s=decode_s / n_decoded,
        achieved=achieved(llm.engine, since=before),
    )


def offline_text(points: list[OfflinePoint]) -> str:
    """The points as a table. ``of limit`` is the share of the product rate for prefill, and of the read rate for decode."""
    heads = ("batch", "prefill", "tok/s", "FLOP/s", "of limit", "decode step", "tok/s", "GB/s", "of limit")
    widths = (7, 11, 10, 9, 10, 13, 10, 8, 10)
    lines = ["".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)) + "   all measured"]
    for p in points:
        prefill, decode = p.achieved.prefill, p.achieved.decode
        cells = (
            str(p.batch),
            format_seconds(p.prefill_s),
            f"{p.prefill_tok_per_s:,.0f}",
            format_count(prefill.flop_per_s),
            _percent(prefill.flop_share),
            format_seconds(p.tpot_s),
            f"{p.decode_tok_per_s:,.1f}",
            f"{decode.bytes_per_s / 1e9:.3g}",
            _percent(decode.read_share),
        )
        lines.append("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return "\n".join([*lines, "", *(f"{name:18}{formula}" for name, formula in FORMULAS.items())])


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"
