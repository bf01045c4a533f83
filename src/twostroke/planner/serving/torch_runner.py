"""Serving by torch on a calibrated CPU without the native library: the machine's rates, what torch loses of them, and a wide
interval. Its own steps are not measured: they took calibration a minute, and missed prompts by more than these rates do
(docs/decisions.md, 81)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twostroke.core.matrices import block_kinds
from twostroke.core.named import inputs, named
from twostroke.core.policy import MAX_PAGES, TOKEN_BUDGET, WEIGHT_ONLY_MULTIPLE
from twostroke.core.rates import Phase
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.corrections import learned_factor
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import ASSUMED_LAUNCH_S
from twostroke.planner.money.power import Busy
from twostroke.planner.serving.datasheet import Datasheet
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_time import LAYER_OPERATORS
from twostroke.planner.serving.strategy import Chunk, Step
from twostroke.planner.work.component import Work

READING_SHARE = 0.5
"""Share of the read rate that torch's products of a few rows reach: 0.45 to 0.6 in decode steps of models from 42 to 350 M
parameters in fp32, bf16 and int8 (2-core EPYC, torch 2.13)."""

TORCH_OPERATORS = 22
"""Torch operators of one layer: two norms; qkv, widening, rotating, copying back, gathering and storing heads, attention, out;
two products, activation and its product."""

STEP_OPERATORS = 36
"""Those of a step outside the layers: tokens, positions, slots, pages and masks turned into tensors, rotary tables, embedding,
final norm, head, and drawing tokens."""


class TorchRunner(Datasheet):
    """The engine's own limits of a step and of the cache; int8 matrices may be held twice."""

    token_budget = TOKEN_BUDGET
    most_pages = MAX_PAGES

    def __init__(self, spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> None:
        super().__init__(spec, shape, hardware)
        start_s = ASSUMED_LAUNCH_S["cpu"]  # inside a step; in a loop of one small operator it is a quarter of that
        lost = replace(
            self.rates,
            product_bandwidth_share=READING_SHARE,
            cache_bandwidth_share=READING_SHARE,
            operator_s=start_s * TORCH_OPERATORS / sum(LAYER_OPERATORS.values()),
            step_s=start_s * STEP_OPERATORS,
        )
        self.rates = inputs(lost)
        self.note = "torch's steps are not calibrated: the machine's rates, of which it reaches half where it reads."

    @property
    def cached(self) -> ModelSpec:
        return self.spec.attended

    def weights_bytes(self) -> float:
        return super().weights_bytes() + self._second_copies_bytes()

    def added_s(self, prefill_s: float, step_s: float, batch: int | None = None) -> float:
        """As the native engine's: a prompt holds up those that decode for as long as it takes."""
        return prefill_s

    def prefill(self) -> tuple[Work, ...]:
        return tuple(work.stretched(learned_factor(self.hardware, "prefill")) for work in super().prefill())

    def decode(self, batch: int | None = None) -> tuple[Work, ...]:
        return tuple(work.stretched(learned_factor(self.hardware, "decode")) for work in super().decode(batch))

    def prefill_s(self) -> float:
        return learned_factor(self.hardware, "prefill") * super().prefill_s()

    def decode_s(self) -> float:
        return learned_factor(self.hardware, "decode") * super().decode_s()

    def step(self, batch: int) -> Step:
        once, ratio = super().step(batch), learned_factor(self.hardware, "decode")
        return once._replace(seconds=ratio * once.seconds, busy=once.busy.times(ratio))

    def prompt_busy(self) -> Busy:
        return super().prompt_busy().times(learned_factor(self.hardware, "prefill"))

    def step_seconds(self, decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        phase: Phase = "prefill" if chunks else "decode"
        return learned_factor(self.hardware, phase) * super().step_seconds(decoding, context, chunks)

    def _second_copies_bytes(self) -> float:
        """Bytes of the int8 matrices that are held twice, plain for few rows and packed for many: those that one row passes
        with int8 weights alone, where the machine has both kernels. No copy is on disk."""
        products, hardware = scheme_of(self.shape.scheme).torch, self.hardware
        if len(products) == 1 or not all(map(hardware.has_scheme, products)):
            return 0.0
        limit = hardware.crossovers.int8_weight_only_max_macs
        twice = 1.0 * sum(
            len(layers) * p.stored
            for matrices, layers in block_kinds(self.spec)
            for p in matrices
            if p.weights <= limit and p.k % WEIGHT_ONLY_MULTIPLE == 0 and not p.chooses
        )
        return named("second_copies_bytes", twice, "bytes", "int8 matrices held twice: plain for few rows, packed for many")
