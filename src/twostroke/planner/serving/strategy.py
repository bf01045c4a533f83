"""What a serving plan asks of an engine: bytes of its weights and of its cache, seconds of a prompt and of a step.

There is one strategy an engine: ``native`` at the rates and whole steps that calibration measured of it, ``torch_runner`` where
the machine has no native library, ``datasheet`` for everything else. ``plan.strategy_of`` chooses, once a plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostroke.core.named import letter, named, smallest
from twostroke.core.policy import CACHE_SHARE, MAX_PAGES, MAX_RUNNING, TOKEN_BUDGET, default_pages
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.power import Busy, busy_of
from twostroke.planner.serving.memory import kv_bytes_on_device, page_bytes
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.component import Work, total_seconds

GPU_MEMORY_UTILISATION = 0.9
CPU_MEMORY_UTILISATION = 0.5
"""Share of memory that weights and KV cache may take at most: others live on a CPU machine too."""


class Chunk(NamedTuple):
    """Part of a prompt in a step: tokens ``before`` it that are in the cache, ``new`` ones, and whether it ends the prompt, so
    that a token is sampled."""

    before: int
    new: int
    samples: bool = True


StepSeconds = Callable[[int, float, Sequence[Chunk]], float]
"""Seconds of a step: (requests that decode, mean tokens before each of them, chunks of prompts beside them)."""


class Step(NamedTuple):
    """A decode step: its seconds, those of them in collectives, what bounds most of it, and what it keeps busy."""

    seconds: float
    network_s: float
    bound: str
    busy: Busy


class Strategy(ABC):
    """How one engine serves ``spec`` as ``shape`` says on ``hardware``.

    ``token_budget`` is the most tokens of prompts that a step computes, ``most_pages`` the most that its cache counts (None: no
    limit). ``note`` is what a plan says of such predictions; empty for nothing. ``front_end_s`` is between a client under load
    and the first token, beside the engine's steps.
    """

    token_budget: int = TOKEN_BUDGET
    most_pages: int | None = MAX_PAGES
    note = ""
    front_end_s = 0.0

    def __init__(self, spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> None:
        self.spec, self.shape, self.hardware = spec, shape, hardware
        self.token_budget = shape.token_budget or self.token_budget

    # -- memory of one device

    @abstractmethod
    def weights_bytes(self) -> float:
        """What the weights take in memory."""

    @property
    def stored_scheme(self) -> str:
        """The scheme as it is on disk."""
        return self.shape.scheme

    @property
    def cached(self) -> ModelSpec:
        """The model as this engine's cache holds it."""
        return self.spec

    def page_bytes(self) -> float:
        """What one device keeps of a page."""
        return kv_bytes_on_device(self.cached, self.shape, page_bytes(self.cached, self.shape))

    def room_for_kv(self) -> float:
        """Bytes left for the KV cache, by the engine's own rule. May be negative."""
        hardware = self.hardware
        most = min(GPU_MEMORY_UTILISATION, hardware.lent_share) if hardware.kind == "gpu" else CPU_MEMORY_UTILISATION
        share = letter("share", most)
        held, process = self.weights_bytes(), letter("process", hardware.process.resident_bytes)
        source = f"{hardware.label}: memory {hardware.basis}, share assumed"
        room = policy_of(self.shape.engine).room_bytes(share, hardware.memory_bytes, held, process)
        return named("room_for_kv_bytes", room, "bytes", source, "assumed")

    def cache_pages(self) -> int:
        """Pages that the engine takes: of ``kv_cache_bytes``, or ``default_pages`` in ``CACHE_SHARE`` of the memory that
        weights and process leave on a CPU, in all that may be used on a GPU."""
        page, shape, hardware = self.page_bytes(), self.shape, self.hardware
        if hardware.kind == "gpu":
            free = self.room_for_kv()
        else:
            free = CACHE_SHARE * (hardware.memory_bytes - (self.weights_bytes() + hardware.process.resident_bytes))
        longest = shape.max_model_len or self.spec.max_positions
        pages = (
            int(shape.kv_cache_bytes // page)
            if shape.kv_cache_bytes
            else default_pages(page, free, longest, shape.max_running or MAX_RUNNING)
        )
        return letter("pages", pages if self.most_pages is None else min(pages, self.most_pages))

    def touched_cache_bytes(self, set_aside: float) -> float:
        """Of the cache what is in memory once the batch has been answered."""
        return set_aside

    def working_bytes(self) -> float:
        """Working memory of the largest step."""
        shape, spec = self.shape, self.spec
        w, tokens = letter("w", shape.compute_bytes), smallest(shape.prompt_tokens, self.token_budget)
        activations = tokens * (4 * spec.d_model + 3 * spec.d_ff) * w
        return named("activations_bytes", activations, "bytes", "one layer of the longest prefill")

    def process_bytes(self) -> float:
        """The process at rest."""
        return letter("process", self.hardware.process.resident_bytes)

    # -- threads

    def on_all_threads(self, rows: int, decoding: int) -> bool:
        """Whether a step of ``rows`` tokens, of ``decoding`` requests that decode and of prompts, runs on every processor, so
        that nothing runs beside it undisturbed."""
        return True

    # -- start

    def load_s(self) -> float:
        """Reading the weights, from the page cache where that rate is known."""
        reading = self.hardware.disk_cached_read_bytes_per_s or self.hardware.disk_write_bytes_per_s
        return self.weights_bytes() / letter("reading", reading)

    def first_load_s(self) -> float:
        """The same at a first start, which may have to prepare them."""
        return self.load_s()

    # -- time

    @abstractmethod
    def prefill(self) -> tuple[Work, ...]:
        """One prompt alone by component; what the cache has of it is left out."""

    @abstractmethod
    def decode(self, batch: int | None = None) -> tuple[Work, ...]:
        """A step of ``batch`` requests (default: the shape's) at the mean context of an answer, by component."""

    def prefill_s(self) -> float:
        """Seconds of ``prefill``."""
        return total_seconds(self.prefill())

    def decode_s(self) -> float:
        """Seconds of ``decode``."""
        return total_seconds(self.decode())

    @abstractmethod
    def step(self, batch: int) -> Step:
        """A decode step of ``batch`` requests."""

    def prompt_busy(self) -> Busy:
        """What one prompt alone keeps busy."""
        return busy_of(self.prefill())

    @abstractmethod
    def step_seconds(self, decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        """Seconds of one step (``StepSeconds``): ``decode_s`` for the shape's batch at its context and no chunks, and over the
        chunks of one prompt, with nothing that decodes, ``prefill_s`` in all."""

    @abstractmethod
    def added_s(self, prefill_s: float, step_s: float, batch: int | None = None) -> float:
        """By how much a prompt holds up those that decode: a step with it − a step without."""

    @abstractmethod
    def check_s(self) -> float | None:
        """A step that checks γ drafted tokens of each request and draws one more; None without speculation."""

    def network_s(self) -> tuple[float, float]:
        """Seconds in collectives of a prompt and of a decode step."""
        return 0.0, 0.0

    def tpot_s(self) -> float:
        """Seconds between tokens: a step, or with speculation step ÷ speed-up."""
        step, checking, speculation = self.decode_s(), self.check_s(), self.shape.speculation
        return step if speculation is None or checking is None else step / speculation.speed_up_of(step, checking)
