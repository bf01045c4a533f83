"""Whole steps of the real engine on small models of random weights: a prompt, and decoding by several requests."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twostroke.calibration.timing import DISTURBED_SHARE, Clock, Window
from twostroke.core.crossovers import Crossovers
from twostroke.core.engine_settings import OFF, EngineSettings
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.engine.core import EngineCore
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

CACHE_TOKENS = 16384
"""Tokens that the cache of such an engine holds: more than the requests of any anchor have together."""

GROUP = 4
LONGEST_GROUP_S = 0.03
LEAST_GROUPS = 4
MOST_GROUPS = 40
SECONDS = 0.03

DECODED, FEWEST_DECODED = 64, 8
"""Decode steps that are measured of up to four requests, and at least of many: half before a context and half behind it. From
the context on, as they were once, 64 steps of a 1.4M model with four requests took 7% longer than those around it."""
WARM_UP = 4


class Engines:
    """Engines on random models, made when they are asked for and kept as long as this object. They choose by ``crossovers``;
    None: by those of the stored profile. ``in_server``: as a server's engine chooses."""

    def __init__(self, folder: Path, crossovers: Crossovers | None = None, in_server: bool = False) -> None:
        self._folder, self._crossovers, self._in_server = folder, crossovers, in_server
        self._engines: dict[tuple[ModelSpec, str, str], EngineCore] = {}

    def get(self, spec: ModelSpec, scheme: str, cache: str = "auto") -> EngineCore:
        key = (spec, scheme, cache)
        if key not in self._engines:
            directory = self.directory(spec)
            if not directory.is_dir():
                decoder = Decoder(spec)
                initialise(decoder, 0)
                save_model(decoder, spec, directory, "bf16")
            n_bytes = 2 * spec.n_layers * spec.d_model * int(scheme_of(scheme).kept_bytes) * CACHE_TOKENS
            settings = EngineSettings(
                dtype=scheme, kv_dtype=cache, kv_cache_bytes=n_bytes, max_step_ratio=OFF, in_server=self._in_server
            )
            engine = EngineCore(directory, settings)
            if self._crossovers is not None:
                engine.plan = replace(engine.plan, crossovers=self._crossovers)
            self._engines[key] = engine
        return self._engines[key]

    def directory(self, spec: ModelSpec) -> Path:
        """Where the model of ``spec`` lies."""
        return self._folder / f"e{spec.d_model}-l{spec.n_layers}-k{spec.n_kv_heads}-v{spec.vocab_size}"


class Prompts:
    """Prompts of which no two begin alike, so that none is found in the prefix cache."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._n = 0

    def add(self, engine: EngineCore, n_tokens: int, n_output: int, temperature: float = 0.0) -> str:
        self._n += 1
        tokens = torch.randint(0, engine.spec.vocab_size, (n_tokens,), generator=self._generator).tolist()
        name = f"anchor-{self._n}"
        engine.add_request(name, tokens, SamplingParams(max_tokens=n_output, ignore_eos=True, temperature=temperature))
        return name


def _median_s(
    clock: Clock, step: Callable[[], object], group: int, most_groups: int, is_enough: Callable[[float, int], bool]
) -> float:
    """Median seconds of a step over undisturbed groups of ``group`` in a row, as an engine runs them: a step that begins after
    a pause, in which caches cooled and threads fell asleep, takes a quarter longer. ``is_enough`` after so many seconds and
    undisturbed groups ends it early."""
    clean: list[float] = []
    disturbed: list[float] = []
    shares: list[float] = []
    begin = time.perf_counter()
    for _ in range(most_groups):
        window = Window()
        for _ in range(group):
            step()
        clock.wait()
        elapsed_s, share = window.elapsed_s, window.waited_share
        shares.append(share)
        (disturbed if share > DISTURBED_SHARE else clean).append(elapsed_s / group)
        if is_enough(time.perf_counter() - begin, len(clean)):
            break
    clock.count(shares)
    return statistics.median(clean or disturbed)


def _group(step_s: float, most: int) -> int:
    """Steps of a group: ``most``, fewer where they are long."""
    return max(1, min(most, int(LONGEST_GROUP_S / max(step_s, 1e-9))))


def decode_step_s(
    clock: Clock, engine: EngineCore, prompts: Prompts, batch: int, context: int, temperature: float = 0.0
) -> float:
    """One step of ``batch`` requests that each have about ``context`` tokens before them, which is the mean over the steps.
    Above a ``temperature`` of 0 their tokens are drawn."""
    n_steps = max(FEWEST_DECODED, DECODED * 4 // max(4, batch))
    before = max(1, context - WARM_UP - n_steps // 2)
    names = [prompts.add(engine, before, WARM_UP + n_steps + 16, temperature) for _ in range(batch)]
    started: set[str] = set()
    while len(started) < batch:
        started |= {event.request_id for event in engine.step()}
    try:
        for _ in range(WARM_UP):
            step_s = clock.once_s(engine.step)
        group = _group(step_s, n_steps // LEAST_GROUPS)
        return _median_s(clock, engine.step, group, n_steps // group, lambda elapsed_s, n_clean: False)
    finally:
        for name in names:
            engine.abort(name)


def prefill_step_s(clock: Clock, engine: EngineCore, prompts: Prompts, n_tokens: int) -> float:
    """One prompt of ``n_tokens``, from being added to its first token."""

    def answer() -> None:
        prompts.add(engine, n_tokens, 1)
        while engine.has_work:
            engine.step()

    def is_enough(elapsed_s: float, n_clean: int) -> bool:
        return clock.is_over(elapsed_s, SECONDS * clock.effort, n_clean >= LEAST_GROUPS)

    return _median_s(clock, answer, _group(clock.once_s(answer), GROUP), MOST_GROUPS, is_enough)


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer without merges, for a model of up to 8,931 tokens: every letter of a prompt is one, and every id is text. A
    token that is no whole character, or has no text, would be sent together with a later one, and could not be timed."""
    letters = "".join(map(chr, range(33, 127)))
    pieces = ["Ġ", *letters, *map("".join, itertools.product(letters, letters))][:vocabulary]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
