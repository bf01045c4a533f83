"""Whole steps of the native engine that calibration takes, and the names of what it learns from them."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.rates import NativeRates, NativeStep, Phase
from twostroke.core.schemes import NATIVE_STEPS, scheme_of
from twostroke.core.spec import ModelSpec

HEAD_DIM = 64
VOCABULARY = 8192
D_FF = {256: 704, 768: 2048}
"""Width → feed-forward width. Two query heads share a key head."""

MAX_POSITIONS = 2048
CONTEXT, LONG_CONTEXT = 128, 1024
UNITS: dict[Phase, tuple[str, ...]] = {
    "prefill": ("step", "layer", "element", "attention"),
    "decode": ("step", "row", "layer", "element", "key"),
}


@dataclass(frozen=True)
class NativeAnchor:
    """A step of a llama of ``n_layers`` of ``width``: the prompt of ``rows`` tokens, or ``rows`` requests that decode with
    ``context`` tokens each before them."""

    phase: Phase
    width: int
    n_layers: int
    rows: int
    context: int = 0

    @property
    def spec(self) -> ModelSpec:
        return native_anchor_spec(self.width, self.n_layers)

    def taking(self, scheme: str, seconds: float) -> NativeStep:
        """Its row in a profile."""
        return NativeStep(self.phase, self.width, self.n_layers, self.rows, self.context, family_of(scheme), seconds)

    def measured_s(self, rates: NativeRates, scheme: str) -> float | None:
        """Its seconds in a profile; None where it was not measured."""
        return next((step.seconds for step in rates.steps if step == self.taking(scheme, step.seconds)), None)


def native_anchor_spec(width: int, n_layers: int) -> ModelSpec:
    heads = width // HEAD_DIM
    return ModelSpec(
        "llama", VOCABULARY, n_layers, width, heads, heads // 2, HEAD_DIM, D_FF[width], MAX_POSITIONS, tied_embeddings=True
    )


NARROW, WIDE = (256, 8), (768, 6)
SHALLOW = (256, 2)

PREFILL_ANCHORS = (
    *(NativeAnchor("prefill", *model, n) for model in (NARROW, WIDE) for n in (16, 128, 512)),
    NativeAnchor("prefill", *NARROW, 1536),
    NativeAnchor("prefill", *SHALLOW, 128),
)
DECODE_ANCHORS = (
    *(NativeAnchor("decode", *model, n, CONTEXT) for model in (NARROW, WIDE) for n in (1, 8, 32)),
    NativeAnchor("decode", *SHALLOW, 1, CONTEXT),
    NativeAnchor("decode", *SHALLOW, 8, CONTEXT),
    NativeAnchor("decode", *NARROW, 1, LONG_CONTEXT),
    NativeAnchor("decode", *NARROW, 8, LONG_CONTEXT),
)

ANCHORS: dict[Phase, tuple[NativeAnchor, ...]] = {"prefill": PREFILL_ANCHORS, "decode": DECODE_ANCHORS}


def has_steps(scheme: str) -> bool:
    """Whether steps are measured of what ``scheme`` multiplies, or of that in another group."""
    return _multiplied(scheme) in NATIVE_STEPS


def family_of(scheme: str) -> str:
    """The one of ``NATIVE_STEPS`` whose steps stand for ``scheme``, bf16 for those without: around products all do the same."""
    return _multiplied(scheme) if has_steps(scheme) else "bf16"


def _multiplied(scheme: str) -> str:
    return scheme_of(scheme_of(scheme).here.multiplied("native")).family
