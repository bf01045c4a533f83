"""Whole steps of the native engine that calibration takes, and the names of what it learns from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostroke.core.schemes import NATIVE_STEPS, scheme_of
from twostroke.core.spec import ModelSpec

Phase = Literal["prefill", "decode"]

HEAD_DIM = 64
VOCABULARY = 8192
D_FF = {256: 704, 768: 2048}
"""Width → feed-forward width. Two query heads share a key head."""

MAX_POSITIONS = 2048
CONTEXT, LONG_CONTEXT = 128, 1024
UNITS: dict[str, tuple[str, ...]] = {
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
    context: int = CONTEXT

    @property
    def spec(self) -> ModelSpec:
        return native_anchor_spec(self.width, self.n_layers)

    def name(self, scheme: str) -> str:
        """Of its seconds in a profile."""
        shape = f"t{self.rows}" if self.phase == "prefill" else f"b{self.rows}_c{self.context}"
        return f"native_{self.phase}_e{self.width}_l{self.n_layers}_{shape}_{family_of(scheme)}_s"


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
    *(NativeAnchor("decode", *model, n) for model in (NARROW, WIDE) for n in (1, 8, 32)),
    NativeAnchor("decode", *SHALLOW, 1),
    NativeAnchor("decode", *SHALLOW, 8),
    NativeAnchor("decode", *NARROW, 1, LONG_CONTEXT),
    NativeAnchor("decode", *NARROW, 8, LONG_CONTEXT),
)


def has_steps(scheme: str) -> bool:
    """Whether steps of ``scheme`` itself, or of it in another group, are measured."""
    return scheme_of(scheme).family in NATIVE_STEPS


def family_of(scheme: str) -> str:
    """The one of ``NATIVE_STEPS`` whose steps stand for ``scheme``: its own in another group, else bf16's. Around products all
    do the same."""
    return scheme_of(scheme).family if has_steps(scheme) else "bf16"


def fitted_name(phase: str, scheme: str, unit: str) -> str:
    """Of the seconds of one unit: ``native_decode_int8_layer_s``."""
    return f"native_{phase}_{family_of(scheme)}_{unit}_s"
