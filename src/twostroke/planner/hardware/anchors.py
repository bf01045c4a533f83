"""Whole steps that calibration takes with the real engines, and how a plan is held to them.

Rates of parts, measured one by one, miss what parts do to one another: caches that are never warm, an allocator that has to
find room, threads that wait. So a few whole steps are measured as well. A plan for an anchor's own shape should give what was
measured; measured ÷ planned is the anchor's ratio, and other plans are multiplied with the ratios of the anchors next to them,
linear in log width and in log rows, flat beyond the ends. Public decode tables say how much that is worth: rates alone leave
36 to 59% of median error, two measured points 8.8% (the comparison is in ``docs/decisions.md``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twostroke.core.errors import ConfigError
from twostroke.core.named import letter
from twostroke.core.rates import NativeRates, NativeStep, Phase
from twostroke.core.schemes import CACHE_TYPES, NATIVE_STEPS, scheme_of
from twostroke.core.spec import ModelSpec


def interpolate_log(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at ``x`` by linear interpolation of log y in log x between sorted ``points``; flat beyond the first and the last."""
    ordered = sorted(points)
    if not ordered:
        raise ConfigError("no calibrated points to interpolate between. Run `twostroke calibrate`.")
    if x <= ordered[0][0]:
        return ordered[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(ordered):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return ordered[-1][1]


Ratios = Mapping[tuple[int, int], float]
"""(width, rows) → measured ÷ planned."""


def ratio_at(ratios: Ratios, width: float, rows: float) -> float:
    """The ratio at (``width``, ``rows``): bilinear in the logs between anchors, flat beyond them; 1 without any."""
    if not ratios:
        return 1.0
    columns: dict[int, list[tuple[float, float]]] = {}
    for (w, n), ratio in ratios.items():
        columns.setdefault(w, []).append((float(n), ratio))
    return letter("ratio", interpolate_log([(float(w), interpolate_log(points, rows)) for w, points in columns.items()], width))


# -- models that are run -------------------------------------------------------------------------------------------------

HEAD_DIM = 64
D_FF = {128: 384, 256: 704, 768: 2048, 2048: 5632}
"""Width → feed-forward width of the models that are run."""

MAX_POSITIONS = 2048
VOCABULARY = 4096
"""Of the models that are trained; those that are served have twice as many tokens, and half as many key heads."""


def anchor_spec(width: int, n_layers: int, vocabulary: int, n_kv_heads: int) -> ModelSpec:
    """The llama whose steps are measured."""
    return ModelSpec(
        "llama", vocabulary, n_layers, width, width // HEAD_DIM, n_kv_heads, HEAD_DIM, D_FF[width], MAX_POSITIONS,
        tied_embeddings=True,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingAnchor:
    """A training step with AdamW, of ``shallow`` and of ``deep`` layers of ``width``, on ``batch_size`` rows of
    ``sequence_length`` tokens. The two depths tell what a layer takes from what surrounds the layers."""

    width: int
    shallow: int
    deep: int
    batch_size: int
    sequence_length: int = 1024

    def spec(self, n_layers: int) -> ModelSpec:
        spec = anchor_spec(self.width, n_layers, VOCABULARY, n_kv_heads=self.width // HEAD_DIM)
        return spec.with_(max_positions=self.sequence_length)


COMPILED_ANCHORS = (TrainingAnchor(128, 2, 6, 4, 256), TrainingAnchor(256, 2, 6, 4), TrainingAnchor(768, 1, 3, 2))
ADAPTER_ANCHOR, ADAPTER_RANK, ADAPTER_DROPOUT = TrainingAnchor(128, 1, 3, 4, 128), 8, 0.05
"""A step of LoRA on every matrix, compiled in bf16: so small that starting its many narrow operations is most of it."""

EAGER_ANCHORS = (TrainingAnchor(256, 1, 3, 2),)
"""Eager steps are what a machine without a compiler takes: one anchor, and a small one, since each takes twice as long."""


GPU_ANCHORS: dict[str, tuple[TrainingAnchor, ...]] = {
    "compiled": (TrainingAnchor(256, 2, 6, 64), TrainingAnchor(768, 1, 3, 32), TrainingAnchor(2048, 1, 3, 16)),
    "eager": (TrainingAnchor(768, 1, 3, 16),),
}
"""Of a GPU, with tokens enough to fill it: 65,536, 32,768 and 16,384 a step."""


def training_anchors(mode: str, kind: str) -> tuple[TrainingAnchor, ...]:
    """Those that are measured "compiled" (in bf16) or "eager" on a "cpu" or a "gpu"."""
    if kind == "gpu":
        return GPU_ANCHORS[mode]
    return COMPILED_ANCHORS if mode == "compiled" else EAGER_ANCHORS


AROUND_SHARES = (0.02, 0.9)
"""Shares of a shallow step that what surrounds its layers is held between, when noise would leave nothing or all of it."""


def layer_and_around(anchor: TrainingAnchor, shallow_s: float, deep_s: float) -> tuple[float, float]:
    """(seconds of one layer, seconds around all of them) of the line through the two depths."""
    around_s = (anchor.deep * shallow_s - anchor.shallow * deep_s) / (anchor.deep - anchor.shallow)
    least, most = (share * shallow_s for share in AROUND_SHARES)
    around_s = min(max(around_s, least), most)
    return max(deep_s - around_s, shallow_s - around_s) / anchor.deep, around_s


CONTEXT, LONG_CONTEXT = 128, 1024
UNITS: dict[Phase, tuple[str, ...]] = {
    "prefill": ("step", "layer", "barrier", "element", "attention"),
    "decode": ("step", "row", "logit", "layer", "barrier", "element", "attention", "key", "far_key"),
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
    sharing: int = 2  # query heads that read one key head
    vocabulary: int = 2 * VOCABULARY
    cache: str = "bf16"

    @property
    def spec(self) -> ModelSpec:
        n_kv_heads = max(1, self.width // HEAD_DIM // self.sharing)
        return anchor_spec(self.width, self.n_layers, self.vocabulary, n_kv_heads)

    def taking(self, scheme: str, seconds: float) -> NativeStep:
        """Its row in a profile."""
        shape = self.phase, self.width, self.n_layers, self.rows, self.context
        return NativeStep(*shape, family_of(scheme), seconds, self.sharing, self.vocabulary, self.cache)

    def measured_s(self, rates: NativeRates, scheme: str) -> float | None:
        """Its seconds in a profile; None where it was not measured."""
        return next((step.seconds for step in rates.steps if step == self.taking(scheme, step.seconds)), None)


SMALLEST, NARROW, WIDE = (128, 4), (256, 8), (768, 6)
SHALLOW = (256, 2)

PREFILL_ANCHORS = (
    *(NativeAnchor("prefill", *SMALLEST, n) for n in (16, 128)),
    *(NativeAnchor("prefill", *model, n) for model in (NARROW, WIDE) for n in (16, 128, 512)),
    NativeAnchor("prefill", *NARROW, 1536),
    NativeAnchor("prefill", *SHALLOW, 128),
)
DECODE_ANCHORS = (
    *(NativeAnchor("decode", *SMALLEST, n, CONTEXT) for n in (1, 4, 32)),
    NativeAnchor("decode", *SMALLEST, 4, LONG_CONTEXT),
    NativeAnchor("decode", *NARROW, 4, CONTEXT),
    *(NativeAnchor("decode", *model, n, CONTEXT) for model in (NARROW, WIDE) for n in (1, 8, 32)),
    *(NativeAnchor("decode", *SHALLOW, n, CONTEXT) for n in (1, 8)),
    *(NativeAnchor("decode", *NARROW, n, LONG_CONTEXT) for n in (1, 8)),
    # Does attention cost by its query heads or by what they read? Plans of heads that share nothing came out 60% too long.
    *(NativeAnchor("decode", *SMALLEST, n, LONG_CONTEXT, sharing=1) for n in (1, 4)),
    # And what of a row is looking for its token among the vocabulary?
    *(NativeAnchor("decode", *SMALLEST, n, CONTEXT, vocabulary=2048) for n in (1, 8)),
)

CACHE_ANCHORS = tuple(
    replace(anchor, cache=cache)
    for cache in CACHE_TYPES
    if cache != NativeAnchor.cache
    for anchor in (NativeAnchor("prefill", *NARROW, 1536), NativeAnchor("decode", *NARROW, 8, LONG_CONTEXT))
)
"""Anchors over caches of other types, of a model in bf16: what the type alone changes."""

ANCHORS: dict[Phase, tuple[NativeAnchor, ...]] = {"prefill": PREFILL_ANCHORS, "decode": DECODE_ANCHORS}


def has_steps(scheme: str) -> bool:
    """Whether steps are measured of what ``scheme`` multiplies, or of that in another group."""
    return _multiplied(scheme) in NATIVE_STEPS


def family_of(scheme: str) -> str:
    """The one of ``NATIVE_STEPS`` whose steps stand for ``scheme``, bf16 for those without: around products all do the same."""
    return _multiplied(scheme) if has_steps(scheme) else "bf16"


def _multiplied(scheme: str) -> str:
    return scheme_of(scheme_of(scheme).here.multiplied("native")).family
