"""Whole steps of the real engine on small models of random weights: decode at several batch sizes, depths, contexts and widths,
and prompts of several lengths. What a step and a layer cost beyond their arithmetic is read off them."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from twostroke.calibration.operations import LEAST_FIXED_S, fixed_and_rate
from twostroke.calibration.timing import DISTURBED_SHARE, Clock, Window
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.profile import MachineProfile
from twostroke.core.rates import DecodeStarts, TorchRunnerRates, TorchStep
from twostroke.core.schemes import TORCH_STEPS, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.engine.core import EngineCore
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.save import save_model
from twostroke.planner.hardware.tables import hardware_from_profile
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.torch_runner import around_layers, layer_operations, layer_products
from twostroke.planner.training.anchors import (
    DECODE_BATCHES,
    DECODE_CONTEXT,
    DECODE_LAYERS,
    PREFILL_TOKENS,
    WIDTHS,
    anchor_spec,
)
from twostroke.planner.work.weights import weights_bytes
from twostroke.scheduling.sampling_params import SamplingParams

REQUESTS: dict[Literal["one", "many"], int] = {"one": 1, "many": 8}
"""Requests of the step that stands for one, and for many."""

SHALLOW = 2
LONG_CONTEXT = 1024
CACHE_TOKENS = max(DECODE_BATCHES) * LONG_CONTEXT // 2
GROUP = 4
LONGEST_GROUP_S = 0.03
LEAST_GROUPS = 4
MOST_GROUPS = 40
SECONDS = 0.08
LEAST_START_SHARE = 0.2


class Engines:
    """Engines on random models, made when they are asked for and kept as long as this object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[tuple[ModelSpec, str], EngineCore] = {}

    def get(self, spec: ModelSpec, scheme: str) -> EngineCore:
        key = (spec, scheme)
        if key not in self._engines:
            directory = self._folder / f"e{spec.d_model}-l{spec.n_layers}"
            if not directory.is_dir():
                decoder = Decoder(spec)
                initialise(decoder, 0)
                save_model(decoder, spec, directory, "bf16")
            n_bytes = 2 * spec.n_layers * spec.d_model * int(scheme_of(scheme).kept_bytes) * CACHE_TOKENS
            self._engines[key] = EngineCore(directory, EngineSettings(dtype=scheme, kv_cache_bytes=n_bytes))
        return self._engines[key]


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
        if elapsed >= SECONDS * clock.effort and (len(clean) >= LEAST_GROUPS or elapsed >= 4 * SECONDS * clock.effort):
            break
    clock.count(shares)
    return statistics.median(clean or disturbed)


def decode_step_s(clock: Clock, engine: EngineCore, prompts: Prompts, batch: int, context: int) -> float:
    """One step of ``batch`` requests that each have about ``context`` tokens before them."""
    names = [prompts.add(engine, context, MOST_GROUPS * GROUP + 16) for _ in range(batch)]
    started: set[str] = set()
    while len(started) < batch:
        started |= {event.request_id for event in engine.step()}
    try:
        return _steady_s(clock, engine.step)
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


def measure_serving_steps(clock: Clock, tell: Callable[[float, str], None]) -> TorchRunnerRates:
    """``steps`` of the anchors of ``planner.anchors``, and for the narrow model ``decode``: a step outside its layers and a
    layer without keys, products included as they are, and (KV head, key) pairs per second of its attention."""
    steps: list[TorchStep] = []
    starts: list[DecodeStarts] = []
    narrow, deep = WIDTHS[0], DECODE_LAYERS[WIDTHS[0]]
    heads = narrow // 64
    with tempfile.TemporaryDirectory(prefix="twostroke-anchors-") as folder:
        engines, prompts = Engines(Path(folder)), Prompts()
        for i, scheme in enumerate(TORCH_STEPS):
            tell(i / len(TORCH_STEPS), f"{scheme} steps of the engine")
            at_depth: dict[int, float] = {}
            for width in WIDTHS:
                engine = engines.get(anchor_spec(width, DECODE_LAYERS[width]), scheme)
                for n_tokens in PREFILL_TOKENS:
                    seconds = prefill_step_s(clock, engine, prompts, n_tokens)
                    steps.append(TorchStep("prefill", width, scheme, n_tokens, seconds))
                for batch in DECODE_BATCHES:
                    seconds = decode_step_s(clock, engine, prompts, batch, DECODE_CONTEXT)
                    steps.append(TorchStep("decode", width, scheme, batch, seconds))
                    if width == narrow:
                        at_depth[batch] = seconds
            for requests, batch in REQUESTS.items():
                shallow = decode_step_s(
                    clock, engines.get(anchor_spec(narrow, SHALLOW), scheme), prompts, batch, DECODE_CONTEXT
                )
                longer = decode_step_s(clock, engines.get(anchor_spec(narrow, deep), scheme), prompts, batch, LONG_CONTEXT)
                layer_s = max((at_depth[batch] - shallow) / (deep - SHALLOW), LEAST_FIXED_S)
                longer_s = layer_s + max(longer - at_depth[batch], 0.0) / deep
                pairs = float(heads * batch)
                fixed_s, pairs_per_s = fixed_and_rate(pairs * DECODE_CONTEXT, pairs * LONG_CONTEXT, layer_s, longer_s)
                step_s = max(shallow - SHALLOW * layer_s, LEAST_FIXED_S)
                starts.append(DecodeStarts(requests, scheme, step_s, fixed_s, pairs_per_s))
    return TorchRunnerRates(steps=tuple(steps), decode=tuple(starts))


def without_products(profile: MachineProfile) -> MachineProfile:
    """``profile`` with the arithmetic and the bytes of products and small operations taken off every ``DecodeStarts.layer_s``,
    and the head's off every ``step_s``, at the profile's own rates: what is left is the start of operators, which a wider model
    pays alike. At least ``LEAST_START_SHARE`` is left."""
    hardware = hardware_from_profile(profile)
    spec: ModelSpec = anchor_spec(WIDTHS[0], DECODE_LAYERS[WIDTHS[0]])

    def left(starts: DecodeStarts) -> DecodeStarts:
        n, working_set = REQUESTS[starts.requests], weights_bytes(spec, starts.scheme)
        shape = ServingShape(scheme=starts.scheme, batch=n, prompt_tokens=DECODE_CONTEXT, output_tokens=1)
        inside = [*layer_products(spec, shape, n, working_set, hardware), *layer_operations(spec, shape, n, hardware)]
        around = around_layers(spec, shape, n, n, working_set, hardware)
        return replace(
            starts,
            layer_s=_left(starts.layer_s, sum(w.seconds for w in inside)),
            step_s=_left(starts.step_s, sum(w.seconds - w.launch_s for w in around)),
        )

    rates = profile.torch_runner
    return replace(profile, torch_runner=replace(rates, decode=tuple(map(left, rates.decode))))


def _left(whole_s: float, known_s: float) -> float:
    return max(whole_s - known_s, LEAST_START_SHARE * whole_s)
