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
    None: by those of the stored profile."""

    def __init__(self, folder: Path, crossovers: Crossovers | None = None) -> None:
        self._folder, self._crossovers = folder, crossovers
        self._engines: dict[tuple[ModelSpec, str], EngineCore] = {}

    def get(self, spec: ModelSpec, scheme: str) -> EngineCore:
        key = (spec, scheme)
        if key not in self._engines:
            directory = self.directory(spec)
            if not directory.is_dir():
                decoder = Decoder(spec)
                initialise(decoder, 0)
                save_model(decoder, spec, directory, "bf16")
            n_bytes = 2 * spec.n_layers * spec.d_model * int(scheme_of(scheme).kept_bytes) * CACHE_TOKENS
            engine = EngineCore(directory, EngineSettings(dtype=scheme, kv_cache_bytes=n_bytes, max_step_ratio=OFF))
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

    def add(self, engine: EngineCore, n_tokens: int, n_output: int) -> str:
        self._n += 1
        tokens = torch.randint(0, engine.spec.vocab_size, (n_tokens,), generator=self._generator).tolist()
        name = f"anchor-{self._n}"
        engine.add_request(name, tokens, SamplingParams(max_tokens=n_output, ignore_eos=True, temperature=0.0))
        return name


def _steady_s(clock: Clock, step: Callable[[], object]) -> float:
    """Median seconds of a step over undisturbed groups of ``GROUP`` (fewer, where they are long) in a row, as an engine runs
    them: a step that begins after a pause, in which caches cooled and threads fell asleep, takes a quarter longer."""
    clean: list[float] = []
    disturbed: list[float] = []
    shares: list[float] = []
    group = max(1, min(GROUP, int(LONGEST_GROUP_S / max(clock.once_s(step), 1e-9))))
    begin = time.perf_counter()
    for _ in range(MOST_GROUPS):
        window = Window()
        for _ in range(group):
            step()
        clock.wait()
        elapsed_s, share = window.elapsed_s, window.waited_share
        shares.append(share)
        (disturbed if share > DISTURBED_SHARE else clean).append(elapsed_s / group)
        elapsed = time.perf_counter() - begin
        if clock.is_over(elapsed, SECONDS * clock.effort, len(clean) >= LEAST_GROUPS):
            break
    clock.count(shares)
    return statistics.median(clean or disturbed)


def decode_step_s(clock: Clock, engine: EngineCore, prompts: Prompts, batch: int, context: int) -> float:
    """One step of ``batch`` requests that each have about ``context`` tokens before them: the median over undisturbed groups of
    steps in a row, whose mean context that is."""
    n_steps = max(FEWEST_DECODED, DECODED * 4 // max(4, batch))
    before = max(1, context - WARM_UP - n_steps // 2)
    names = [prompts.add(engine, before, WARM_UP + n_steps + 16) for _ in range(batch)]
    started: set[str] = set()
    while len(started) < batch:
        started |= {event.request_id for event in engine.step()}
    clean: list[float] = []
    disturbed: list[float] = []
    shares: list[float] = []
    try:
        for _ in range(WARM_UP):
            step_s = clock.once_s(engine.step)
        group = max(1, min(n_steps // LEAST_GROUPS, int(LONGEST_GROUP_S / max(step_s, 1e-9))))
        for _ in range(n_steps // group):
            window = Window()
            for _ in range(group):
                engine.step()
            clock.wait()
            elapsed_s, share = window.elapsed_s, window.waited_share
            shares.append(share)
            (disturbed if share > DISTURBED_SHARE else clean).append(elapsed_s / group)
        clock.count(shares)
        return statistics.median(clean or disturbed)
    finally:
        for name in names:
            engine.abort(name)


def prefill_step_s(clock: Clock, engine: EngineCore, prompts: Prompts, n_tokens: int) -> float:
    """One prompt of ``n_tokens``, from being added to its first token."""

    def answer() -> None:
        prompts.add(engine, n_tokens, 1)
        while engine.has_work:
            engine.step()

    return _steady_s(clock, answer)


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer without merges, for a model of up to 8,931 tokens: every letter of a prompt is one, and every id is text. A
    token that is no whole character, or has no text, would be sent together with a later one, and could not be timed."""
    letters = "".join(map(chr, range(33, 127)))
    pieces = ["Ġ", *letters, *map("".join, itertools.product(letters, letters))][:vocabulary]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
