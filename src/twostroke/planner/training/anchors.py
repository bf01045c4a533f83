"""Whole steps that calibration takes with the real engines, and how a plan is held to them.

Rates of parts, measured one by one, miss what parts do to one another: caches that are never warm, an allocator that has to
find room, threads that wait. So a few whole steps are measured as well. A plan for an anchor's own shape should give what was
measured; measured ÷ planned is the anchor's ratio, and other plans are multiplied with the ratios of the anchors next to them,
linear in log width and in log rows, flat beyond the ends. Public decode tables say how much that is worth: rates alone leave
36 to 59% of median error, two measured points 8.8% (the comparison is in ``docs/decisions.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.spec import ModelSpec

HEAD_DIM = 64
VOCABULARY = 4096
D_FF = {256: 704, 768: 2048}
"""Width → feed-forward width of the models that are run."""

WIDTHS = tuple(D_FF)
MAX_POSITIONS = 2048


def anchor_spec(width: int, n_layers: int) -> ModelSpec:
    """The llama whose steps are measured."""
    heads = width // HEAD_DIM
    return ModelSpec(
        "llama", VOCABULARY, n_layers, width, heads, heads, HEAD_DIM, D_FF[width], MAX_POSITIONS, tied_embeddings=True
    )


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
        return anchor_spec(self.width, n_layers).with_(max_positions=self.sequence_length)


COMPILED_ANCHORS = (TrainingAnchor(256, 2, 6, 4), TrainingAnchor(768, 1, 3, 2))
EAGER_ANCHORS = (TrainingAnchor(256, 1, 3, 2),)
"""Eager steps are what a machine without a compiler takes: one anchor, and a small one, since each takes twice as long."""


def training_anchors(mode: str) -> tuple[TrainingAnchor, ...]:
    """Those that are measured "compiled" (in bf16) or "eager"."""
    return COMPILED_ANCHORS if mode == "compiled" else EAGER_ANCHORS


AROUND_SHARES = (0.02, 0.9)
"""Shares of a shallow step that what surrounds its layers is held between, when noise would leave nothing or all of it."""


def layer_and_around(anchor: TrainingAnchor, shallow_s: float, deep_s: float) -> tuple[float, float]:
    """(seconds of one layer, seconds around all of them) of the line through the two depths."""
    around_s = (anchor.deep * shallow_s - anchor.shallow * deep_s) / (anchor.deep - anchor.shallow)
    least, most = (share * shallow_s for share in AROUND_SHARES)
    around_s = min(max(around_s, least), most)
    return max(deep_s - around_s, shallow_s - around_s) / anchor.deep, around_s


DECODE_LAYERS = {256: 6, 768: 4}
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT = 128
PREFILL_TOKENS = (32, 128, 512)
